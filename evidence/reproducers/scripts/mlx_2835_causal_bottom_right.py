"""Causal counts from the bottom right, and PyTorch's from the top left."""

# /// script
# dependencies = ["mlx", "numpy"]
# ///

import mlx.core as mx
import numpy as np

value = mx.array(np.broadcast_to(np.arange(4, dtype=np.float32)[:, None], (1, 1, 4, 4)).copy())
got = mx.fast.scaled_dot_product_attention(mx.zeros((1, 1, 2, 4)), value, value, scale=0.5, mask="causal")
got = np.array(got)[0, 0, :, 0]
print("expected [0.  0.5], from the top left")
print("got     ", got)
raise SystemExit(int(not np.allclose(got, [0, 0.5])))
