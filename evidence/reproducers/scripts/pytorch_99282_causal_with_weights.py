"""Asking for weights drops causality."""

# /// script
# dependencies = ["torch"]
# ///

import torch

torch.manual_seed(0)
module, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 3, 8)
try:
    _, got = module(x, x, x, is_causal=True, need_weights=True)
except RuntimeError as error:
    print("refused:", error)
    raise SystemExit(0) from None
print("expected zeros above the diagonal")
print("got     ", got[0, 0].tolist())
raise SystemExit(int(got.triu(1).any()))
