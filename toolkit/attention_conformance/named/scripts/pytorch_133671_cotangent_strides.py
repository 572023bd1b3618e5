"""The gradient depends on the strides of the cotangent.

The backward pass receives a gradient whose memory the caller has laid out: permuted, or expanded from one number by
`sum()`. A kernel that assumes the strides of its own output reads other elements. The gradients look plausible, and
training merely gets worse. In this thread, the two layouts also turned out to explain a wrong report.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#133671"
# title = "Scaled_dot_product_attention CPU flash_attention backend backward result is not the same as math backend"
# property = "memory layout"
# line = 0
# versions = "closed; right in 2.13.0"
# geometry = { B = 2, H = 2, M = 49, N = 49, D = 32, E = 32 }
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
arrays = [torch.randn(2, 2, 49, 32, requires_grad=True) for _ in range(3)]
d_output = torch.randn(2, 49, 2, 32).transpose(1, 2)
expected = torch.autograd.grad(attention(*arrays), arrays, d_output.contiguous())
got = torch.autograd.grad(attention(*arrays), arrays, d_output)
errors = [(one - two).abs().max().item() for one, two in zip(got, expected, strict=True)]
print("expected equal gradients of query, key and value")
print("got      differences of", errors)
raise SystemExit(int(not all(error <= 1e-5 for error in errors)))
