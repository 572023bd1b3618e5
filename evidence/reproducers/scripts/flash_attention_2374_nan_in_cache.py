"""The unused part of a cache holds NaN, and reaches the output."""

# /// script
# dependencies = ["flash-attn", "torch"]
# ///

import torch
from flash_attn import flash_attn_with_kvcache

if not torch.cuda.is_available():
    print("not here: a GPU")
    raise SystemExit(77)

torch.manual_seed(0)
lengths = torch.tensor([32, 64, 96, 48], device="cuda", dtype=torch.int32)
query = torch.randn(4, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
key, value = (torch.randn(4, 128, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
expected = flash_attn_with_kvcache(query, key, value, cache_seqlens=lengths)
value[torch.arange(128, device="cuda") >= lengths[:, None]] = torch.nan
got = flash_attn_with_kvcache(query, key, value, cache_seqlens=lengths)
print("expected no NaN, as before")
print("got     ", got.isnan().sum().item(), "NaN of", got.numel())
raise SystemExit(int(not torch.equal(got, expected)))
