"""A triangle of ones is added to the scores."""

# /// script
# dependencies = ["tinygrad", "numpy"]
# ///

import os

os.environ.setdefault("DEV", "PYTHON")
import numpy as np
from tinygrad import Tensor

random = np.random.default_rng(0)
query, key, value = (random.standard_normal((1, 1, 3, 4), np.float32) for _ in range(3))
weights = np.exp(np.where(np.tri(3, dtype=bool), query @ np.swapaxes(key, -1, -2) / 2, -np.inf))
expected = weights / weights.sum(-1, keepdims=True) @ value
got = Tensor(query).scaled_dot_product_attention(Tensor(key), Tensor(value), is_causal=True).numpy()
print("expected", expected[0, 0, 1])
print("got     ", got[0, 0, 1])
raise SystemExit(int(not np.allclose(got, expected, atol=1e-5)))
