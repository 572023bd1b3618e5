"""A mask of 65,537 × 65,537 is read from the wrong rows."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

if not torch.cuda.is_available():
    print("not here: a GPU")
    raise SystemExit(77)

size = 65537
query = torch.zeros(1, 1, size, 16, device="cuda", dtype=torch.float16)
value = torch.zeros_like(query)
value[..., 0, :] = 1  # the output is one over the number of keys
mask = torch.ones(size, size, dtype=torch.bool, device="cuda").tril()[None, None]
got = 1 / attention(query, query, value, attn_mask=mask)[0, 0, -1, 0].float()
print("expected", size, "keys for the last query, within 1%")
print("got     ", got.item())
raise SystemExit(int(not abs(got.item() / size - 1) <= 0.01))
