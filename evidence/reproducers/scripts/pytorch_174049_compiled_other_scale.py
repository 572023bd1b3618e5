"""The compiler fuses a written attention, and changes its scale."""

# /// script
# dependencies = ["torch"]
# ///

import torch


def attention(query, key, value, mask):
    scores = torch.matmul(query, key.transpose(-2, -1)).div(0.3535)
    return torch.softmax(scores + mask, dim=-1).matmul(value)


torch.manual_seed(0)
query, key, value = (torch.randn(2, 4, 16, 64) for _ in range(3))
mask = torch.zeros(2, 1, 1, 16)
with torch.no_grad():
    expected, got = attention(query, key, value, mask), torch.compile(attention)(query, key, value, mask)
print("expected", expected[0, 0, 0, :3].tolist())
print("got     ", got[0, 0, 0, :3].tolist())
raise SystemExit(int(not torch.allclose(got, expected, atol=1e-4)))
