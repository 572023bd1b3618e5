"""Two parts without keys merge to NaN."""

# /// script
# dependencies = ["flashinfer-python", "torch"]
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
