"""A module returns None in place of the weights of an empty batch.

The last batch of a distributed run may be empty for one of the workers. With a batch of 0, the fast path of
evaluation returns None where weights were asked for. The slow path returns an empty array of the right shape. Code
that reads a shape stops with an error about None.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#192651"
# title = "Handle empty inputs consistently in native MHA fast paths"
# property = "sizes"
# line = 10
# versions = "open; 2.13.0 too"
# geometry = { B = 0, H = 2, M = 3, N = 3, D = 2, E = 2 }
# like = ["no-entries", "no-queries"]
# ///

import torch

module, x = torch.nn.MultiheadAttention(4, 2, batch_first=True).eval(), torch.randn(0, 3, 4)
with torch.no_grad():
    _, weights = module(x, x, x, need_weights=True)
print("expected an array of shape (0, 3, 3)")
print("got     ", None if weights is None else tuple(weights.shape))
raise SystemExit(int(weights is None or tuple(weights.shape) != (0, 3, 3)))
