"""65,536 heads are more than a GPU can count in one direction."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
query = torch.zeros(1, 65536, 10, 16, device=device)
value = torch.arange(65536.0, device=device)[None, :, None, None].expand(1, 65536, 10, 16)
got = attention(query, query, value.contiguous())[0, :, 0, 0]
wrong = ~((got - torch.arange(65536.0, device=device)).abs() <= 0.01)
print("expected the number of its head in each output")
print("got     ", wrong.sum().item(), "others on", device)
raise SystemExit(int(wrong.any()))
