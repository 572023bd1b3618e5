"""Asking for weights turns a masked head into NaN everywhere.

The mask of a module excludes all keys from one of its heads. With `need_weights=False` that head contributes 0. With
`need_weights=True` another path is taken: the head is NaN, and the output projection spreads it over all channels. So
an argument that only asks for more information changes the result.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#160064"
# title = "MultiheadAttention returns all NaN when using attn_mask to fully mask some heads, and using `need_weights=True`"
# property = "weights"
# line = 6
# versions = "open; 2.13.0 too"
# geometry = { B = 1, H = 3, M = 2, N = 2, D = 1, E = 1 }
# like = ["empty-row-mask", "weights-change-nothing"]
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
