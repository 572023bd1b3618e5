"""The first block of a row is masked, all other scores are negative, and the row is 0."""

# /// script
# dependencies = ["flash-attn", "torch"]
# ///

import torch
from flash_attn import flash_attn_func

if not torch.cuda.is_available():
    print("not here: a GPU")
    raise SystemExit(77)

query = torch.full((1, 88, 14, 64), 5.0, device="cuda", dtype=torch.bfloat16)
key = torch.full((1, 448, 2, 64), -5.0, device="cuda", dtype=torch.bfloat16)  # scores of -200
value = torch.ones(1, 448, 2, 64, device="cuda", dtype=torch.bfloat16)
got = flash_attn_func(query, key, value, causal=True)
print("expected 1 everywhere")
print("got     ", (got != 1).sum().item(), "other numbers of", got.numel())
raise SystemExit(int((got != 1).any()))
