"""A row of the lowest finite bias is not masked: it keeps an average."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 40, 16), torch.randn(1, 1, 40, 16)
bias = torch.zeros(1, 1, 2, 40)
bias[..., 1, :] = torch.finfo(torch.float32).min
got = attention(query, key, value, attn_mask=bias)[0, 0, 1]
expected = value[0, 0].mean(0)
print("expected", expected[:3].tolist())
print("got     ", got[:3].tolist())
raise SystemExit(int(not torch.allclose(got, expected, atol=1e-5)))
