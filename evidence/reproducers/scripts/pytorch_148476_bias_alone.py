"""The gradient of the bias alone is asked for."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
torch.manual_seed(0)
query, key, value = (torch.randn(1, 2, size, 8, device=device) for size in (5, 7, 7))
bias = torch.randn(1, 2, 5, 7, device=device, requires_grad=True)
(got,) = torch.autograd.grad(attention(query, key, value, attn_mask=bias).sum(), bias)
query.requires_grad_()
_, expected = torch.autograd.grad(attention(query, key, value, attn_mask=bias).sum(), (query, bias))
print("expected", expected[0, 0, 0, :3].tolist())
print("got     ", got[0, 0, 0, :3].tolist(), "on", device)
raise SystemExit(int(not torch.allclose(got, expected, atol=1e-5)))
