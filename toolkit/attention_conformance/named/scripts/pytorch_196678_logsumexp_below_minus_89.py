"""The gradient is NaN if all scores of a row lie below -89.

The backward pass computes the weights again, as exp(score - logsumexp). In the padding of the last block the score is
0, and a logsumexp below -88.7 makes the exponential of 89 overflow. Infinity times 0 is NaN. Only lengths that leave
half a block empty show it, and only with very negative scores, which trained models have.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#196678"
# title = "[SDPA] cuDNN backward returns NaN grad_q for seq_len % 128 == 64 with attn_mask on H100/H200 (regression since 2.11, default backend)"
# property = "gradient"
# line = 0
# versions = "2.11 to 2.13 on H100; closed in September 2026"
# needs = "cuda"
# geometry = { B = 1, H = 2, M = 192, N = 192, D = 64, E = 64 }
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

if not torch.cuda.is_available():
    print("not here: a GPU")
    raise SystemExit(77)

torch.manual_seed(0)
query = torch.full((1, 2, 192, 64), 4.0, device="cuda", dtype=torch.bfloat16, requires_grad=True)
key = (-4.0 + 0.1 * torch.randn(1, 2, 192, 64, device="cuda")).to(torch.bfloat16)  # scores of about -128
value = torch.randn(1, 2, 192, 64, device="cuda", dtype=torch.bfloat16)
mask = torch.ones(1, 1, 192, 192, device="cuda", dtype=torch.bool)
(got,) = torch.autograd.grad(attention(query, key, value, attn_mask=mask).float().sum(), query)
print("expected no NaN")
print("got     ", got.isnan().sum().item(), "NaN of", got.numel())
raise SystemExit(int(got.isnan().any()))
