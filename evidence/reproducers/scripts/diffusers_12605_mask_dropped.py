"""A mask is accepted, and passed to no kernel."""

# /// script
# dependencies = ["diffusers", "torch"]
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
