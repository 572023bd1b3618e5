"""Only the value is a view, and its strides are taken from the key."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
torch.manual_seed(0)
query, key = (torch.randn(1, 16, 62, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
value = torch.randn(1, 62, 16, 128, device=device, dtype=torch.bfloat16).transpose(1, 2)
expected = attention(query, key, value.contiguous()).float()
got = attention(query, key, value).float()
print("expected", expected[0, 1, 1, :3].tolist())
print("got     ", got[0, 1, 1, :3].tolist(), "on", device)
raise SystemExit(int(not torch.allclose(got, expected, atol=2e-2)))
