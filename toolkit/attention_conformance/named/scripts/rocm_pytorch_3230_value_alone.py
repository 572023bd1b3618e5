"""Only the value is a view, and its strides are taken from the key.

Query and key pass through rotary positions, which writes them anew; the value stays a view of its projection. A
kernel that takes one set of strides for key and value then reads the value wrongly. Making all three contiguous in a
test hides it, and so does making none of them.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "ROCm/pytorch#3230"
# title = "SDPA: FLASH/EFFICIENT backends return wrong values when V is non-contiguous (ROCm 7.0, MI300X)"
# property = "memory layout"
# line = 0
# versions = "ROCm 7.0; closed"
# geometry = { B = 1, H = 16, M = 62, N = 62, D = 128, E = 128 }
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
torch.manual_seed(0)
query, key = (torch.randn(1, 16, 62, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
value = torch.randn(1, 62, 16, 128, device=device, dtype=torch.bfloat16).transpose(1, 2)
expected = attention(query, key, value.contiguous()).float()
got = attention(query, key, value).float()
print("expected", expected[0, 1, 1, :3].tolist())
print("got     ", got[0, 1, 1, :3].tolist(), "on", device)
raise SystemExit(int(not torch.allclose(got, expected, atol=2e-2)))
