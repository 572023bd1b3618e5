"""A score function that does not use the score has no gradient to give.

A score function may replace the score: by a distance with a learnt factor, say. Then query and key have gradients of
0, and the factor has its own. The backward pass expected every score function to depend on the score, and stopped
with an error.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#185991"
# title = "Fix flex_attention score_mod with no score gradient"
# property = "score function"
# line = 7
# versions = "reported in June 2026; closed"
# needs = "cuda"
# geometry = { B = 1, H = 1, M = 3, N = 4, D = 4, E = 4 }
# ///

import torch
from torch.nn.attention.flex_attention import flex_attention

if not torch.cuda.is_available():
    print("not here: a GPU")
    raise SystemExit(77)
torch.manual_seed(0)
query, key, value = (torch.randn(1, 1, size, 4, device="cuda", requires_grad=True) for size in (3, 4, 4))
output = flex_attention(query, key, value, score_mod=lambda score, b, h, row, column: (column - row).to(score.dtype))
got = torch.autograd.grad(output.sum(), (query, key, value), allow_unused=True)
expected = torch.softmax(torch.arange(4.0) - torch.arange(3.0)[:, None], -1).sum(0).cuda()
print("expected no gradient of query and key, and of value", expected.tolist())
print("got     ", [None if g is None else g.abs().max().item() for g in got[:2]], got[2][0, 0, :, 0].tolist())
right = all(g is None or not g.any() for g in got[:2]) and torch.allclose(got[2][0, 0, :, 0], expected)
raise SystemExit(int(not right))
