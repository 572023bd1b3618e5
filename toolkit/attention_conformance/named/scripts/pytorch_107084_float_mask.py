"""A bias given as a float mask is taken for a boolean one.

A float mask is added to the scores; -1 makes a key less likely, and excludes nothing. The fast path of evaluation
converted the mask to booleans, so that every number but 0 excluded its key. Training used the other path: the model
was evaluated with another attention than it was trained with.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#107084"
# title = "[regression] nn.MultiheadAttention does not respect adding of floating point mask to attention for the fast path"
# property = "mask"
# line = 1
# versions = "closed; right in 2.13.0"
# geometry = { B = 1, H = 2, M = 4, N = 4, D = 4, E = 4 }
# like = ["bias"]
# ///

import torch

torch.manual_seed(0)
module, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 4, 8)
bias = torch.randn(4, 4)
expected, _ = module(x, x, x, attn_mask=bias)  # with gradients, so on the slow path
with torch.no_grad():
    got, _ = module(x, x, x, attn_mask=bias)
print("expected", expected[0, 0, :3].tolist())
print("got     ", got[0, 0, :3].tolist())
raise SystemExit(int(not torch.allclose(got, expected, atol=1e-6)))
