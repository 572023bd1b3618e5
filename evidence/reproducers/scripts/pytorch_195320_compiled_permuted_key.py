"""The compiler takes another permutation of the key for its transpose."""

# /// script
# dependencies = ["torch"]
# ///

import torch


def attention(query, key, value):
    return torch.softmax(query @ key.permute(0, 2, 3, 1) / 8**0.5, -1) @ value


torch.manual_seed(0)
query, value = torch.randn(1, 8, 8, 8), torch.randn(1, 8, 8, 8)
key = torch.randn(1, 8, 8, 8)
with torch.no_grad():
    expected, got = attention(query, key, value), torch.compile(attention)(query, key, value)
print("expected", expected[0, 0, 0, :3].tolist())
print("got     ", got[0, 0, 0, :3].tolist())
raise SystemExit(int(not torch.allclose(got, expected, atol=1e-5)))
