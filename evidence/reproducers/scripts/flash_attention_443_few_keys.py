"""Causal from the bottom right, with more queries than keys, leaves rows without keys."""

# /// script
# dependencies = ["flash-attn", "torch"]
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
