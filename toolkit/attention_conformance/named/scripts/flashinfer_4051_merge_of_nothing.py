"""Two parts without keys merge to NaN.

Long keys are cut into parts, and the outputs are merged by their logsumexp. A part without keys has an output of 0
and a logsumexp of -inf. Merging two of them subtracts -inf from -inf. A request that is padding in all parts then
poisons the next layer.
"""

# /// script
# dependencies = ["flashinfer-python", "torch"]
#
# [tool.attention-core]
# thread = "flashinfer-ai/flashinfer#4051"
# title = "[Bug]: Cascade state merging returns NaN when all input states are empty"
# property = "fully masked row"
# line = 4
# versions = "open"
# needs = "cuda"
# geometry = { H = 1, M = 1, E = 64 }
# like = ["pieces-empty"]
# ///

import torch
from flashinfer import merge_state

if not torch.cuda.is_available():
    print("not here: a GPU")
    raise SystemExit(77)

nothing = torch.zeros(1, 1, 64, device="cuda", dtype=torch.float16)
empty = torch.full((1, 1), -torch.inf, device="cuda")
got, logsumexp = merge_state(nothing, empty, nothing, empty)
print("expected 0, and a logsumexp of -inf")
print("got     ", got.flatten()[0].item(), logsumexp.item())
raise SystemExit(int(got.isnan().any() or logsumexp.item() != -torch.inf))
