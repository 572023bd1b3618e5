"""The gradient is NaN if all scores of a row lie below -89."""

# /// script
# dependencies = ["torch"]
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
