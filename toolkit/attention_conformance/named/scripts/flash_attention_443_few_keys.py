"""Causal from the bottom right, with more queries than keys, leaves rows without keys.

With 76 queries and one key, and causality aligned with the last key, only the last query has a key. The other rows
are fully masked, and their logsumexp is infinite. The backward pass computed with it, and the gradient of the query
was NaN.
"""

# /// script
# dependencies = ["flash-attn", "torch"]
#
# [tool.attention-core]
# thread = "Dao-AILab/flash-attention#443"
# title = "[flashv2/BW] `nan` in some configurations"
# property = "gradient"
# line = 4
# versions = "2.0.4; closed"
# needs = "cuda"
# geometry = { B = 1, H = 2, M = 76, N = 1, D = 64, E = 64 }
# like = ["gradient-empty-row"]
# ///

import torch
from flash_attn import flash_attn_func

if not torch.cuda.is_available():
    print("not here: a GPU")
    raise SystemExit(77)

torch.manual_seed(0)
query = torch.randn(1, 76, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True)
key, value = (torch.randn(1, 1, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(2))
got = torch.autograd.grad(flash_attn_func(query, key, value, causal=True).sum(), (query, key, value))
print("expected no NaN, and the gradient of value 1")
print("got     ", [gradient.isnan().sum().item() for gradient in got], got[2].flatten()[0].item())
raise SystemExit(int(any(gradient.isnan().any() for gradient in got) or not torch.all(got[2] == 1)))
