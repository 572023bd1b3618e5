"""The lowest float32 bias becomes -inf in bfloat16, and a row becomes NaN.

A model makes its mask in float32, with the lowest finite number, and casts it to bfloat16 for the attention. That
number rounds to -inf, as bfloat16 has fewer digits. A row that held a finite bias is now fully masked, and gave NaN.
Nothing in the program says -inf.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "allenai/OLMo#323"
# title = "Fix SDP NaN bug"
# property = "fully masked row"
# line = 4
# versions = "OLMo before the change; right in PyTorch 2.13.0"
# geometry = { B = 1, H = 1, M = 2, N = 8, D = 16, E = 16 }
# like = ["empty-row-bias"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = (torch.randn(1, 1, size, 16).to(torch.bfloat16) for size in (2, 8, 8))
bias = torch.full((1, 1, 2, 8), torch.finfo(torch.float32).min).to(torch.bfloat16)
got = attention(query, key, value, attn_mask=bias)
print("expected zeros, as the bias has become", bias.flatten()[0].item())
print("got     ", got[0, 0, 0, :3].tolist())
raise SystemExit(int(got.any()))
