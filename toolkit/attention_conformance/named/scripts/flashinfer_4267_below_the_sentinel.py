"""Scores below -50,000 are taken for masked ones.

Some kernels use a large finite number in place of infinity, as arithmetic with infinity gives NaN. A row whose scores
all lie below it never exceeds the initial maximum, and is returned as 0. Only differences of scores matter to a
softmax, so that adding -250,000 to all of them may change nothing.
"""

# /// script
# dependencies = ["flashinfer-python", "torch"]
#
# [tool.attention-core]
# thread = "flashinfer-ai/flashinfer#4267"
# title = "[Bug] FA2 attention silently outputs zeros when every logit in a row is below -5e4 (math::inf sentinel is a finite value)"
# property = "range"
# line = 0
# versions = "mended"
# needs = "cuda"
# geometry = { B = 1, H = 1, M = 1, N = 8, D = 64, E = 64 }
# ///

import torch
from flashinfer import single_prefill_with_kv_cache

if not torch.cuda.is_available():
    print("not here: a GPU")
    raise SystemExit(77)

query = torch.full((1, 1, 64), 64.0, device="cuda", dtype=torch.bfloat16)
key = torch.full((8, 1, 64), -512.0, device="cuda", dtype=torch.bfloat16)  # scores of -262144
value = torch.arange(8.0, device="cuda").to(torch.bfloat16)[:, None, None].expand(8, 1, 64).contiguous()
got = single_prefill_with_kv_cache(query, key, value)[0, 0, 0].item()
print("expected 3.5, the average of 0 to 7")
print("got     ", got)
raise SystemExit(int(not abs(got - 3.5) <= 0.05))
