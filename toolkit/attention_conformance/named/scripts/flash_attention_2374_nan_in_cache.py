"""The unused part of a cache holds NaN, and reaches the output.

A cache is allocated once, and its unused part holds what memory held before. The kernel reads whole blocks of keys
and gives those beyond the length a weight of 0. For the values, 0 times NaN is NaN. A server sees it after hours,
when memory is used again.
"""

# /// script
# dependencies = ["flash-attn", "torch"]
#
# [tool.attention-core]
# thread = "Dao-AILab/flash-attention#2374"
# title = "FA3/4 does not guard against NaN in unused V cache entries"
# property = "masked non-finite"
# line = 5
# versions = "open; versions 3 and 4"
# needs = "cuda"
# geometry = { B = 4, H = 8, M = 1, N = 128, D = 64, E = 64 }
# like = ["masked-padding"]
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
