"""A module returns None in place of the weights of an empty batch."""

# /// script
# dependencies = ["torch"]
# ///

import torch

module, x = torch.nn.MultiheadAttention(4, 2, batch_first=True).eval(), torch.randn(0, 3, 4)
with torch.no_grad():
    _, weights = module(x, x, x, need_weights=True)
print("expected an array of shape (0, 3, 3)")
print("got     ", None if weights is None else tuple(weights.shape))
raise SystemExit(int(weights is None or tuple(weights.shape) != (0, 3, 3)))
