"""Keys stored by position are farther apart than 32 bits can count."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.attention.flex_attention import flex_attention

if not torch.cuda.is_available():
    print("not here: a GPU")
    raise SystemExit(77)

key = torch.zeros(24000, 700, 1, 128, device="cuda", dtype=torch.float16).permute(1, 2, 0, 3)
value = torch.ones_like(key).requires_grad_()
query = torch.zeros(700, 1, 16, 128, device="cuda", dtype=torch.float16)
output = torch.compile(flex_attention)(query, key, value)
(got,) = torch.autograd.grad(output[-1].sum(), value)
print("expected 16 / 24000 in the last key of the last sample:", 16 / 24000)
print("got     ", got[-1, 0, -1, 0].item())
raise SystemExit(int(not abs(got[-1, 0, -1, 0].item() - 16 / 24000) <= 1e-5))
