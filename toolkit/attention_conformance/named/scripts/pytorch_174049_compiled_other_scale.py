"""The compiler fuses a written attention, and changes its scale.

The compiler looks for attention written by hand, and replaces it by the fused kernel. Its pattern was recorded with
one divisor, and matches others. A model with a scale of its own, such as muP's 1/D, then computes with another one
once it is compiled. Its loss differs, and no message says why. Release 2.13.0 keeps the scale of this script on a
CPU.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#174049"
# title = "[inductor] sdpa pattern matcher ignores scale and get wrong result"
# property = "compiled"
# line = 0
# versions = "reported in February 2026; open; right in 2.13.0"
# geometry = { B = 2, H = 4, M = 16, N = 16, D = 64, E = 64 }
# ///

import torch


def attention(query, key, value, mask):
    scores = torch.matmul(query, key.transpose(-2, -1)).div(0.3535)
    return torch.softmax(scores + mask, dim=-1).matmul(value)


torch.manual_seed(0)
query, key, value = (torch.randn(2, 4, 16, 64) for _ in range(3))
mask = torch.zeros(2, 1, 1, 16)
with torch.no_grad():
    expected, got = attention(query, key, value, mask), torch.compile(attention)(query, key, value, mask)
print("expected", expected[0, 0, 0, :3].tolist())
print("got     ", got[0, 0, 0, :3].tolist())
raise SystemExit(int(not torch.allclose(got, expected, atol=1e-4)))
