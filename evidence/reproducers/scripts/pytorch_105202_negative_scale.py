"""A negative scale is lost in its square root."""

# /// script
# dependencies = ["torch"]
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
