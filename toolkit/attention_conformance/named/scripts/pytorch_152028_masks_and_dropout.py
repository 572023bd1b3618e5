"""A masked query and dropout give NaN.

A module in training drops weights, and one query may not attend to any key. If weights are asked for, its row is NaN;
if not, it is 0. The thread is about a GPU, and the path that returns weights does the same on a CPU.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#152028"
# title = "[CUDA] MultiheadAttention with masks and dropout produces NaNs"
# property = "fully masked row"
# line = 4
# versions = "2.11 and 2.12 on CUDA; open; 2.13.0 too"
# geometry = { B = 2, H = 2, M = 3, N = 4, D = 4, E = 4 }
# like = ["empty-row-mask"]
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
