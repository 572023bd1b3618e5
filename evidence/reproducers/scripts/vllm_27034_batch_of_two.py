"""A sample alone, and next to another one, has another result."""

# /// script
# dependencies = ["torch"]
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
