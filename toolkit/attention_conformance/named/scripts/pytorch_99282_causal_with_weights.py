"""Asking for weights drops causality.

A module has one path that returns the weights and one that does not. The first one ignored `is_causal=True`, so that
looking at the weights of a causal model showed those of another model. Newer versions raise an error, and ask for the
mask as an array.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#99282"
# title = "MultiheadAttention is_causal=True is ignored if need_weights=True"
# property = "causal"
# line = 3
# versions = "2.0.0; refused in 2.13.0"
# geometry = { B = 1, H = 2, M = 3, N = 3, D = 4, E = 4 }
# like = ["weights"]
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
