"""PyTorch's kernels: what each takes, and what it is given.

`fused` has `scaled_dot_product_attention`: `guards` refuses calls, `sdpa` makes them, and on a CPU `guarded` makes them
by `parts`, and looks at results. `flex` has FlexAttention, with `flex_functions`. `hidden` is for accelerators.
"""

from attention_torch.kernels.flex import FlexAttention
from attention_torch.kernels.fused import ScaledDotProduct

__all__ = ["FlexAttention", "ScaledDotProduct"]
