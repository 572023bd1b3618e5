"""A triangle of ones is added to the scores.

A causal mask was a triangle of ones and -inf, added to the scores: visible keys got +1. Adding the same number to a
whole row changes nothing, so that this is right by luck as long as no other number is added. A second rule that is
added to the same triangle breaks it.
"""

# /// script
# dependencies = ["tinygrad", "numpy"]
#
# [tool.attention-core]
# thread = "tinygrad/tinygrad#2425"
# title = "fix causal mask in Tensor class"
# property = "causal"
# line = 3
# versions = "before the change; right in 0.14.0"
# geometry = { B = 1, H = 1, M = 3, N = 3, D = 4, E = 4 }
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
