"""A NaN in a masked value makes the output NaN."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
mask = torch.tensor([True, True, False])
expected = attention(query, key[..., :2, :], value[..., :2, :])
value[..., 2, :] = torch.nan
got = attention(query, key, value, attn_mask=mask.expand(1, 1, 2, 3))
print("expected", expected[0, 0, 0].tolist())
print("got     ", got[0, 0, 0].tolist())
raise SystemExit(int(not torch.allclose(got, expected)))
