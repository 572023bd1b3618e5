"""A boolean mask of 46,342 × 46,342 is read at negative addresses."""

# /// script
# dependencies = ["mlx", "numpy"]
# ///

import mlx.core as mx
import numpy as np

if not mx.metal.is_available():
    print("not here: Metal")
    raise SystemExit(77)
size = 46342
query = mx.zeros((1, 1, size, 64))
value = mx.concatenate([mx.ones((1, 1, 1, 64)), mx.zeros((1, 1, size - 1, 64))], axis=2)
mask = mx.arange(size)[:, None] >= mx.arange(size)
got = 1 / np.array(mx.fast.scaled_dot_product_attention(query, query, value, scale=1.0, mask=mask))[0, 0, -1, 0]
print("expected", size, "keys for the last query, within 1%")
print("got     ", got)
raise SystemExit(int(not abs(got / size - 1) <= 0.01))
