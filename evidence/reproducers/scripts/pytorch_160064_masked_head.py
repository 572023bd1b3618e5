"""Asking for weights turns a masked head into NaN everywhere."""

# /// script
# dependencies = ["torch"]
# ///

import torch

torch.manual_seed(0)
module, x = torch.nn.MultiheadAttention(3, 3, batch_first=True), torch.randn(1, 2, 3)
mask = torch.zeros(3, 2, 2, dtype=torch.bool)
mask[0] = True  # True excludes here
plain, _ = module(x, x, x, attn_mask=mask, need_weights=False)
asked, _ = module(x, x, x, attn_mask=mask, need_weights=True)
print("expected", plain[0, 0].tolist())
print("got     ", asked[0, 0].tolist())
raise SystemExit(int(not torch.allclose(plain, asked)))
