"""Channels that are not next to each other in memory are misread on a CPU."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = (torch.randn(1, 2, 40, 32)[..., ::2] for _ in range(3))
expected = attention(query.contiguous(), key.contiguous(), value.contiguous())
got = attention(query, key, value)
print("expected", expected[0, 0, 0, :3].tolist())
print("got     ", got[0, 0, 0, :3].tolist())
raise SystemExit(int(not torch.allclose(got, expected, atol=1e-5)))
