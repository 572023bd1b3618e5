"""A second call of the same shape, with other strides, uses the plan of the first."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
query, key, value = (torch.randn(1, 2, 40, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
expected = attention(query, key, value).float()  # the first call
strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
got = attention(*strided).float()
print("expected", expected[0, 0, 1, :3].tolist())
print("got     ", got[0, 0, 1, :3].tolist(), "on", device)
raise SystemExit(int(not torch.allclose(got, expected, atol=2e-2)))
