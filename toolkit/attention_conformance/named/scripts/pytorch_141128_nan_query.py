"""A query of NaN gives zeros, as if nothing had gone wrong.

A NaN in a query that takes part is a mistake somewhere before, and has to be seen: its row of the output is NaN. The
code that gives 0 to fully masked rows looked for rows without any finite score. It took a row of NaN for such a row,
so that a diverged model continued with zeros.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#141128"
# title = "Possible regression of F.scaled_dot_product_attention on CPU in PyTorch 2.5"
# property = "attended non-finite"
# line = 5
# versions = "2.5; closed; right in 2.13.0"
# geometry = { B = 1, H = 1, M = 4, N = 32, D = 16, E = 16 }
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = torch.randn(1, 1, 4, 16), torch.randn(1, 1, 32, 16), torch.randn(1, 1, 32, 16)
expected = attention(query, key, value)
query[0, 0, 1] = torch.nan
expected[0, 0, 1] = torch.nan
got = attention(query, key, value)
print("expected", expected[0, 0, :, 0].tolist())
print("got     ", got[0, 0, :, 0].tolist())
rows = got.isnan().any(-1).flatten().tolist()
raise SystemExit(int(rows != [False, True, False, False] or not torch.allclose(got, expected, equal_nan=True)))
