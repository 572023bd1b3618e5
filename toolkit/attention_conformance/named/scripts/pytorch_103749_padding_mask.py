"""A query that may not attend to any key gives NaN.

A padding mask excludes all keys of a padded query. The softmax of a row of -inf is 0/0, so the output of that row was
NaN. The values of padded rows are never used, yet NaN times 0 is NaN: one such row makes the gradients of all weights
NaN.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#103749"
# title = "SDPA produces NaN with padding mask"
# property = "fully masked row"
# line = 4
# versions = "2.0; mended in 2.5; right in 2.13.0"
# geometry = { B = 1, H = 2, M = 6, N = 10, D = 8, E = 8 }
# like = ["empty-row-mask"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
mask = torch.ones(1, 1, 6, 10, dtype=torch.bool)
mask[..., -1, :] = False
got = attention(query, key, value, attn_mask=mask)[..., -1, :]
print("expected zeros in the masked row")
print("got     ", got[0, 0].tolist())
raise SystemExit(int(got.any()))
