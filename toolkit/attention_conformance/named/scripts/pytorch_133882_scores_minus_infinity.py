"""Scores of -inf by overflow are taken for a mask.

No mask is given, and all scores of a query overflow to -inf. The definition gives NaN, which tells the user that
numbers are too large. A kernel that decides by scores which rows are masked gives 0 instead, and the overflow stays
hidden. The thread is about rows that are masked, and its rule is right for those.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#133882"
# title = "Update fused kernels and call _safe_softmax from SDPA"
# property = "fully masked row"
# line = 4
# versions = "2.13.0"
# geometry = { B = 1, H = 1, M = 1, N = 33, D = 16, E = 16 }
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention


def row(num_keys):
    query, key = torch.full((1, 1, 1, 16), 1e20), torch.full((1, 1, num_keys, 16), -1e20)
    return attention(query, key, torch.ones(1, 1, num_keys, 16))[0, 0, 0, 0].item()


got = {num_keys: row(num_keys) for num_keys in (7, 33)}
print("expected NaN for 7 keys, and for 33")
print("got     ", got)
raise SystemExit(int(any(value == value for value in got.values())))
