"""A sample alone, and next to another one, has another result.

A server puts requests of strangers into one batch. The answer to a request may not depend on the others. In the
thread, whole answers were wrong if the batch held two. A weaker form is a last bit that changes, as kernels divide
the work by the shape of the batch. The script asks for equal bits.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "vllm-project/vllm#27034"
# title = "[Bug]: Incorrect outputs with batch size > 1 on AArch64 CPU"
# property = "repetition"
# line = 5
# versions = "vLLM on AArch64; the script asks torch"
# geometry = { B = 2, H = 2, M = 9, N = 40, D = 16, E = 16 }
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = torch.randn(2, 2, 9, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
expected = attention(query[:1], key[:1], value[:1])
got = attention(query, key, value)[:1]
print("expected the same bits")
print("got      a difference of", (got - expected).abs().max().item())
raise SystemExit(int(not torch.equal(got, expected)))
