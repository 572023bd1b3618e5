"""Gradients behind the last packed sequence are never written."""

# /// script
# dependencies = ["flash-attn", "torch"]
# ///

import torch
from flash_attn import flash_attn_varlen_func

if not torch.cuda.is_available():
    print("not here: a GPU")
    raise SystemExit(77)

torch.manual_seed(0)
arrays = [torch.randn(8, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3)]
ends = torch.tensor([0, 5], device="cuda", dtype=torch.int32)  # 3 of the 8 positions are padding
output = flash_attn_varlen_func(*arrays, ends, ends, 5, 5)
poison = [torch.full((8, 2, 64), torch.nan, device="cuda", dtype=torch.float16) for _ in range(100)]
del poison
got = torch.autograd.grad(output[:5].sum(), arrays)
print("expected zeros behind the sequence")
print("got     ", [gradient[5:].abs().max().item() for gradient in got])
raise SystemExit(int(any(not (gradient[5:] == 0).all() for gradient in got)))
