"""A NaN in a masked value makes the output NaN.

Padded keys and values hold whatever memory held before, sometimes NaN. The mask gives them a weight of 0, and users
expect that to be the end of it. But 0 times NaN is NaN, so the product of weights and values brings it back into
every output.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#101967"
# title = "scaled_dot_product_attention produces NaN when input has NaN in masked-out positions"
# property = "masked non-finite"
# line = 5
# versions = "since 2.0; 2.13.0 too"
# geometry = { B = 1, H = 1, M = 2, N = 3, D = 4, E = 4 }
# like = ["masked-nan-value", "masked-nan-key"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
mask = torch.tensor([True, True, False])
expected = attention(query, key[..., :2, :], value[..., :2, :])
value[..., 2, :] = torch.nan
got = attention(query, key, value, attn_mask=mask.expand(1, 1, 2, 3))
print("expected", expected[0, 0, 0].tolist())
print("got     ", got[0, 0, 0].tolist())
raise SystemExit(int(not torch.allclose(got, expected)))
