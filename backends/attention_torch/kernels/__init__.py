"""PyTorch's kernels: what each takes, and what it is given."""

from attention_torch.kernels.flex import FlexAttention
from attention_torch.kernels.fused import ScaledDotProduct

__all__ = ["FlexAttention", "ScaledDotProduct"]
