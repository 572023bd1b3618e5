"""Padded queries and keys are masked together, and their rows are NaN."""

# /// script
# dependencies = ["mlx", "numpy"]
# ///

import mlx.core as mx
import numpy as np

random = np.random.default_rng(0)
query, key, value = (mx.array(random.standard_normal((1, 1, 8, 8), np.float32)) for _ in range(3))
real = np.arange(8) < 4
mask = mx.array(real[:, None] & real)
got = np.array(mx.fast.scaled_dot_product_attention(query, key, value, scale=0.35, mask=mask))
print("expected no NaN")
print("got     ", np.isnan(got).sum(), "NaN; first padded row", got[0, 0, 4, :3])
raise SystemExit(int(np.isnan(got).any()))
