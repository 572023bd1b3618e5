"""The same call gives other gradients, although told to be deterministic.

Many blocks add to the gradient of one query, in the order in which they finish. Floating-point sums depend on the
order, so the last bits change from run to run. A deterministic mode fixes the order. In this thread a user saw
changes in that mode too; another one ran 200 repetitions on the same kind of GPU and saw none.
"""

# /// script
# dependencies = ["flash-attn", "torch"]
#
# [tool.attention-core]
# thread = "Dao-AILab/flash-attention#2244"
# title = "FA3 deterministic=True gives non-deterministic gradients in backward (flash_attn_func / flash_attn_qkvpacked_func)"
# property = "repetition"
# line = 0
# versions = "open; another user could not repeat it"
# needs = "cuda"
# geometry = { B = 2, H = 12, M = 1024, N = 1024, D = 64, E = 64 }
# ///

import torch
from flash_attn import flash_attn_func

if not torch.cuda.is_available():
    print("not here: a GPU")
    raise SystemExit(77)

torch.manual_seed(0)
arrays = [torch.randn(2, 1024, 12, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3)]
runs = [torch.autograd.grad(flash_attn_func(*arrays, deterministic=True).sum(), arrays) for _ in range(30)]
others = sum(not torch.equal(one, other) for run in runs[1:] for one, other in zip(run, runs[0], strict=True))
print("expected the same bits in 30 runs")
print("got     ", others, "gradients with others")
raise SystemExit(int(others > 0))
