"""One query with 32 heads on 2 key heads, and 1024 keys, reads the wrong memory.

Decoding has one query and a long cache, and grouped heads share it. Kernels have a path of their own for this, which
splits the keys and merges the parts. On MPS, sums and maxima of the parts had 16 bits of memory and were written in
32, beyond the end of the array. It starts at 1024 keys, where shapes of unit tests do not reach.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#174861"
# title = "[MPS] Out of bounds memory access/corruption and correctness issue in SDPA"
# property = "grouped heads"
# line = 9
# versions = "since 2.7.1 on MPS; open"
# geometry = { B = 1, H = 32, G = 2, M = 1, N = 1024, D = 128, E = 128 }
# like = ["grouped-heads"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
torch.manual_seed(0)
query, key, value = (
    torch.randn(1, heads, size, 128, device=device).bfloat16() for heads, size in ((32, 1), (2, 1024), (2, 1024))
)
repeated = (x.repeat_interleave(16, dim=1) for x in (key, value))
expected = attention(query.double().cpu(), *(x.double().cpu() for x in repeated))
got = attention(query, key, value, enable_gqa=True).double().cpu()
print("expected an error below 0.01")
print("got      an error of", (got - expected).abs().max().item(), "on", device)
raise SystemExit(int(not torch.allclose(got, expected, atol=0.01)))
