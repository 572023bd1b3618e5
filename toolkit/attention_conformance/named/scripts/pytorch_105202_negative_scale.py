"""A negative scale is lost in its square root.

Some kernels multiply query and key by the square root of the scale each, which keeps both products small. A negative
scale has no such root: the result is NaN, or that of the absolute value. Attention that prefers the least similar
keys is rare, but legal.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#105202"
# title = "fix sdpa math accuracy issue when scale is negative"
# property = "scale"
# line = 7
# versions = "before the change; right in 2.13.0"
# geometry = { B = 1, H = 1, M = 2, N = 5, D = 4, E = 4 }
# ///

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
expected = torch.softmax(-0.7 * query @ key.mT, -1) @ value
with sdpa_kernel(SDPBackend.MATH):
    got = attention(query, key, value, scale=-0.7)
print("expected", expected[0, 0, 0].tolist())
print("got     ", got[0, 0, 0].tolist())
raise SystemExit(int(not torch.allclose(got, expected, atol=1e-5)))
