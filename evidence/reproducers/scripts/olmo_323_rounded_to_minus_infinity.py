"""The lowest float32 bias becomes -inf in bfloat16, and a row becomes NaN."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = (torch.randn(1, 1, size, 16).to(torch.bfloat16) for size in (2, 8, 8))
bias = torch.full((1, 1, 2, 8), torch.finfo(torch.float32).min).to(torch.bfloat16)
got = attention(query, key, value, attn_mask=bias)
print("expected zeros, as the bias has become", bias.flatten()[0].item())
print("got     ", got[0, 0, 0, :3].tolist())
raise SystemExit(int(got.any()))
