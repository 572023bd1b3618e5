"""A mask of 65,537 × 65,537 is read from the wrong rows.

The address of a row of the mask is its number times its length, computed in 32 bits. Beyond 2³² elements the product
starts again at 0, and late queries read the mask of early ones. The output has no NaN and the right size. The script
has equal scores and values that count keys, so that a wrong row says how many keys it saw.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#187227"
# title = "[SDPA] Fix 32-bit offset overflow in mem-efficient attention forward with attn_bias"
# property = "sizes"
# line = 0
# versions = "2.14 in development, on CUDA; open"
# needs = "cuda"
# geometry = { B = 1, H = 1, M = 65537, N = 65537, D = 16, E = 16 }
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
