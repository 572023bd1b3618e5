"""One query after eight keys is causal from the top left, and sees the first key only.

A decoding step has one new query and all keys so far, and users expect `is_causal=True` to change nothing. PyTorch
aligns the triangle with the first key, so the query sees key 0 alone. Both conventions exist, and the documentation
of PyTorch names its one. `causal_lower_right` is the other; here it is `Causal(offset=7)`.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#103082"
# title = "Ambiguitiy in causal-mask in scaled_dot_product_attention"
# property = "causal"
# line = 3
# versions = "since 2.0, as documented"
# geometry = { B = 1, H = 1, M = 1, N = 8, D = 4, E = 4 }
# like = ["causal-more-keys"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 8, 4), torch.randn(1, 1, 8, 4)
expected = attention(query, key, value)
got = attention(query, key, value, is_causal=True)
print("expected", expected.flatten().tolist())
print("got     ", got.flatten().tolist(), "the first value:", torch.equal(got[0, 0, 0], value[0, 0, 0]))
raise SystemExit(int(not torch.allclose(got, expected)))
