"""Scores below -50,000 are taken for masked ones."""

# /// script
# dependencies = ["flashinfer-python", "torch"]
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
