"""A row of the lowest finite bias is not masked: it keeps an average.

Many models write a mask as the lowest finite number, not as -inf. A row of such numbers excludes nothing by the
formula. Adding a score to so large a number loses it, and the output is the average of all values. Between two
versions, one device began to give NaN for such rows.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#110213"
# title = "`scaled_dot_product_attention` behaves differently between v2.0 and v2.1"
# property = "fully masked row"
# line = 4
# versions = "2.0 and 2.1 differ; right in 2.13.0"
# geometry = { B = 1, H = 1, M = 2, N = 40, D = 16, E = 16 }
# like = ["lowest-finite-bias"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 40, 16), torch.randn(1, 1, 40, 16)
bias = torch.zeros(1, 1, 2, 40)
bias[..., 1, :] = torch.finfo(torch.float32).min
got = attention(query, key, value, attn_mask=bias)[0, 0, 1]
expected = value[0, 0].mean(0)
print("expected", expected[:3].tolist())
print("got     ", got[:3].tolist())
raise SystemExit(int(not torch.allclose(got, expected, atol=1e-5)))
