"""65,536 heads are more than a GPU can count in one direction.

A GPU starts blocks in a grid, and two of its three sides end at 65,535. A kernel that puts heads, or samples, on such
a side cannot start with more. Axial attention over an image folds one axis into the batch and reaches this number.
Some kernels raise an error; others skip the work, and the output is whatever memory held.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#142228"
# title = "Scaled Dot-Product Attention Invalid Configuration Error on Large batch size"
# property = "sizes"
# line = 0
# versions = "open; CUDA"
# geometry = { B = 1, H = 65536, M = 10, N = 10, D = 16, E = 16 }
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
query = torch.zeros(1, 65536, 10, 16, device=device)
value = torch.arange(65536.0, device=device)[None, :, None, None].expand(1, 65536, 10, 16)
got = attention(query, query, value.contiguous())[0, :, 0, 0]
wrong = ~((got - torch.arange(65536.0, device=device)).abs() <= 0.01)
print("expected the number of its head in each output")
print("got     ", wrong.sum().item(), "others on", device)
raise SystemExit(int(wrong.any()))
