"""A band of 10 keys in 600 gives NaN, as whole blocks of a row are masked.

Each query may attend to its 10 latest keys, and the mask is a matrix of 0 and -inf. A blockwise kernel meets the keys
in blocks. For late queries the first blocks hold -inf alone, the running maximum is -inf, and -inf minus -inf is NaN.
A short sequence has one block, so small tests pass.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#127055"
# title = "MultiheadAttention returns NaNs when need_weights=False for long sequences with a mask that ignores old tokens"
# property = "fully masked row"
# line = 4
# versions = "2.3.0; closed; right in 2.13.0"
# geometry = { B = 1, H = 1, M = 600, N = 600, D = 2, E = 2 }
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = (torch.randn(1, 1, 600, 2) for _ in range(3))
distance = torch.arange(600)[:, None] - torch.arange(600)
band = torch.where((distance >= 0) & (distance < 10), 0.0, -torch.inf)
weights = torch.softmax(query @ key.mT / 2**0.5 + band, -1)
got = attention(query, key, value, attn_mask=band[None, None])
print("expected no NaN, and an error below 1e-5")
print("got     ", got.isnan().sum().item(), "NaN, and an error of", (got - weights @ value).abs().max().item())
raise SystemExit(int(not torch.allclose(got, weights @ value, atol=1e-5)))
