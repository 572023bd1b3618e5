"""Query, key and value are views of one packed array."""

# /// script
# dependencies = ["mlx", "numpy"]
# ///

import mlx.core as mx
import numpy as np

packed = mx.array(np.random.default_rng(0).standard_normal((2, 6, 3, 4, 64), np.float32))
query, key, value = (packed[:, :, part].transpose(0, 2, 1, 3) for part in range(3))
copies = [mx.array(np.array(x)) for x in (query, key, value)]
expected = np.array(mx.fast.scaled_dot_product_attention(*copies, scale=0.125))
got = np.array(mx.fast.scaled_dot_product_attention(query, key, value, scale=0.125))
print("expected", expected[0, 1, 1, :3])
print("got     ", got[0, 1, 1, :3])
raise SystemExit(int(not np.allclose(got, expected, atol=1e-5)))
