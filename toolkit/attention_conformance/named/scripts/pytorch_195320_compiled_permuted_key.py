"""The compiler takes another permutation of the key for its transpose.

The compiler looks for attention written by hand, and replaces it by the fused kernel. It recognizes the key by one
permutation of axes. A key that is stored as (batch, length, heads, width) needs another permutation, and matched the
pattern as well. The compiled model then computes with transposed keys.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#195320"
# title = "[inductor] SDPA fusion matches a permuted K as if it were key.transpose(-2,-1), silently producing wrong attention outputs"
# property = "compiled"
# line = 0
# versions = "2.13.0 and before"
# geometry = { B = 1, H = 8, M = 8, N = 8, D = 8, E = 8 }
# ///

import torch


def attention(query, key, value):
    return torch.softmax(query @ key.permute(0, 2, 3, 1) / 8**0.5, -1) @ value


torch.manual_seed(0)
query, value = torch.randn(1, 8, 8, 8), torch.randn(1, 8, 8, 8)
key = torch.randn(1, 8, 8, 8)
with torch.no_grad():
    expected, got = attention(query, key, value), torch.compile(attention)(query, key, value)
print("expected", expected[0, 0, 0, :3].tolist())
print("got     ", got[0, 0, 0, :3].tolist())
raise SystemExit(int(not torch.allclose(got, expected, atol=1e-5)))
