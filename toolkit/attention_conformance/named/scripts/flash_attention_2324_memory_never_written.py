"""Gradients behind the last packed sequence are never written.

Sequences of several lengths are packed one after the other, and the rest of the array is padding. The backward kernel
writes the gradients of the sequences alone. The memory behind them holds what was there before, sometimes NaN, which
the optimizer then adds to shared weights. The script fills memory with NaN and gives it back before the call.
"""

# /// script
# dependencies = ["flash-attn", "torch"]
#
# [tool.attention-core]
# thread = "Dao-AILab/flash-attention#2324"
# title = "[varlen] add autograd function to zero out nan padding"
# property = "masked non-finite"
# line = 5
# versions = "before the change"
# needs = "cuda"
# geometry = { B = 1, H = 2, M = 8, N = 8, D = 64, E = 64 }
# like = ["masked-padding"]
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
