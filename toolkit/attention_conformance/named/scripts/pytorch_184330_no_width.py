"""Queries and keys of width 0 have equal scores.

With no channels, every product of a query and a key is an empty sum, so all scores are 0. The softmax of equal scores
is uniform, and the output is the average of the values. PyTorch 2.12 returned 0 for such a call, and a gradient of 0.
A model meets this when a pruned head, or a search over widths, ends at 0.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#184330"
# title = "SDPA returns 0 output and 0 gradient with corner case input since 2.12"
# property = "sizes"
# line = 10
# versions = "2.12; closed; right in 2.13.0"
# geometry = { B = 1, H = 1, M = 3, N = 4, D = 0, E = 1 }
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

query, key = torch.zeros(1, 1, 3, 0), torch.zeros(1, 1, 4, 0)
value = torch.tensor([1.0, 2.0, 3.0, 6.0]).reshape(1, 1, 4, 1)
got = attention(query, key, value, scale=1.0).flatten()
print("expected the average of the values, 3.0")
print("got     ", got.tolist())
raise SystemExit(int(not torch.allclose(got, torch.tensor(3.0))))
