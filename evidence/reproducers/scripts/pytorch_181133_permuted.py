"""Heads that were moved by a permutation of axes are read in the wrong order."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
torch.manual_seed(0)
query, key, value = (torch.randn(84, 3, 3, 64, device=device).permute(0, 2, 1, 3) for _ in range(3))
expected = attention(query.contiguous(), key.contiguous(), value.contiguous())
got = attention(query, key, value)
print("expected", expected[0, 0, 0, :3].tolist())
print("got     ", got[0, 0, 0, :3].tolist(), "on", device)
raise SystemExit(int(not torch.allclose(got, expected, atol=1e-4)))
