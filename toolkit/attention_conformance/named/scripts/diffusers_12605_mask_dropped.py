"""A mask is accepted, and passed to no kernel.

One function serves many kernels, and some of them have no argument for a mask. It left the mask out, without an
error, so that padding took part in the image. Which kernel runs depends on what is installed. The script asks the
kernel of PyTorch, which takes masks.
"""

# /// script
# dependencies = ["diffusers", "torch"]
#
# [tool.attention-core]
# thread = "huggingface/diffusers#12605"
# title = "dispatch_attention_fn silently ignores attn_mask for certain backends"
# property = "mask"
# line = 1
# versions = "closed; right in 0.42.1 for PyTorch's kernel"
# geometry = { B = 1, H = 1, M = 2, N = 3, D = 8, E = 8 }
# like = ["mask"]
# ///

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

torch.manual_seed(0)
query, key, value = (torch.randn(1, size, 1, 8) for size in (2, 3, 3))
mask = torch.tensor([True, True, False])[None, None, None].expand(1, 1, 2, 3)
expected = dispatch_attention_fn(query, key[:, :2], value[:, :2], backend="native")
got = dispatch_attention_fn(query, key, value, attn_mask=mask, backend="native")
print("expected", expected[0, 0, 0, :3].tolist())
print("got     ", got[0, 0, 0, :3].tolist())
raise SystemExit(int(not torch.allclose(got, expected, atol=1e-5)))
