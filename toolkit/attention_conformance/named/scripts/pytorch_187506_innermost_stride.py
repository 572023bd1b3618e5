"""Channels that are not next to each other in memory are misread on a CPU.

Views such as `x[..., ::2]`, or a transposed matrix, have channels that lie apart in memory. The flash kernel for CPUs
passed their address to a matrix product that expects them side by side. It read neighbouring numbers instead, without
an error. A contiguous copy of the same numbers gives the right result.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#187506"
# title = "Fix cpu flash sdpa incorrect results when inputs' innermost dim is not contiguous"
# property = "memory layout"
# line = 0
# versions = "reported in June 2026; right in 2.13.0"
# geometry = { B = 1, H = 2, M = 40, N = 40, D = 16, E = 16 }
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = (torch.randn(1, 2, 40, 32)[..., ::2] for _ in range(3))
expected = attention(query.contiguous(), key.contiguous(), value.contiguous())
got = attention(query, key, value)
print("expected", expected[0, 0, 0, :3].tolist())
print("got     ", got[0, 0, 0, :3].tolist())
raise SystemExit(int(not torch.allclose(got, expected, atol=1e-5)))
