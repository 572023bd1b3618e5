"""The gradient depends on the strides of the cotangent."""

# /// script
# dependencies = ["torch"]
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
