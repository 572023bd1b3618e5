"""A bias given as a float mask is taken for a boolean one."""

# /// script
# dependencies = ["torch"]
# ///

import torch

torch.manual_seed(0)
module, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 4, 8)
bias = torch.randn(4, 4)
expected, _ = module(x, x, x, attn_mask=bias)  # with gradients, so on the slow path
with torch.no_grad():
    got, _ = module(x, x, x, attn_mask=bias)
print("expected", expected[0, 0, :3].tolist())
print("got     ", got[0, 0, :3].tolist())
raise SystemExit(int(not torch.allclose(got, expected, atol=1e-6)))
