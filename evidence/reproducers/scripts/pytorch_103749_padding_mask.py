"""A query that may not attend to any key gives NaN."""

# /// script
# dependencies = ["torch"]
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
