"""The first block of a row is masked, all other scores are negative, and the row is 0.

A kernel keeps the largest score so far. If the first block of keys is masked, its maximum may be taken as 0, to avoid
-inf. Scores of -200 in later blocks are compared with that 0, and exp(-200) is 0 in float32. The whole row is lost.
Random inputs have positive scores in every row.
"""

# /// script
# dependencies = ["flash-attn", "torch"]
#
# [tool.attention-core]
# thread = "Dao-AILab/flash-attention#2082"
# title = "[Cute, Fwd] Flash forward produces incorrect row max in certain cases resulting in zeroed heads"
# property = "range"
# line = 4
# versions = "version 4 in development; closed"
# needs = "cuda"
# geometry = { B = 1, H = 14, G = 2, M = 88, N = 448, D = 64, E = 64 }
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
