"""A score function that does not use the score has no gradient to give."""

# /// script
# dependencies = ["torch"]
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
