"""A query of NaN gives zeros, as if nothing had gone wrong."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = torch.randn(1, 1, 4, 16), torch.randn(1, 1, 32, 16), torch.randn(1, 1, 32, 16)
expected = attention(query, key, value)
query[0, 0, 1] = torch.nan
expected[0, 0, 1] = torch.nan
got = attention(query, key, value)
print("expected", expected[0, 0, :, 0].tolist())
print("got     ", got[0, 0, :, 0].tolist())
rows = got.isnan().any(-1).flatten().tolist()
raise SystemExit(int(rows != [False, True, False, False] or not torch.allclose(got, expected, equal_nan=True)))
