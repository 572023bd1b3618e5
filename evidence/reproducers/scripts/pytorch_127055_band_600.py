"""A band of 10 keys in 600 gives NaN, as whole blocks of a row are masked."""

# /// script
# dependencies = ["torch"]
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
