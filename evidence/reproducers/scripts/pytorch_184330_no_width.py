"""Queries and keys of width 0 have equal scores."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

query, key = torch.zeros(1, 1, 3, 0), torch.zeros(1, 1, 4, 0)
value = torch.tensor([1.0, 2.0, 3.0, 6.0]).reshape(1, 1, 4, 1)
got = attention(query, key, value, scale=1.0).flatten()
print("expected the average of the values, 3.0")
print("got     ", got.tolist())
raise SystemExit(int(not torch.allclose(got, torch.tensor(3.0))))
