"""A masked query and dropout give NaN."""

# /// script
# dependencies = ["torch"]
# ///

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
module = torch.nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True, device=device)
query, key = torch.randn(2, 3, 8, device=device), torch.randn(2, 4, 8, device=device)
mask = torch.zeros(3, 4, dtype=torch.bool, device=device)
mask[0] = True  # True excludes here
got, _ = module(query, key, key, attn_mask=mask, need_weights=True)
print("expected no NaN")
print("got     ", got.isnan().sum().item(), "NaN on", device)
raise SystemExit(int(got.isnan().any()))
