"""One query after eight keys is causal from the top left, and sees the first key only."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 8, 4), torch.randn(1, 1, 8, 4)
expected = attention(query, key, value)
got = attention(query, key, value, is_causal=True)
print("expected", expected.flatten().tolist())
print("got     ", got.flatten().tolist(), "the first value:", torch.equal(got[0, 0, 0], value[0, 0, 0]))
raise SystemExit(int(not torch.allclose(got, expected)))
