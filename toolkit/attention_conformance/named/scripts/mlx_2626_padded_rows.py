"""Padded queries and keys are masked together, and their rows are NaN.

A batch is padded to 8 positions, of which 4 are real, and the mask excludes the padding on both sides. The padded
rows have no key left and gave NaN. In the next layer they are keys: masked, but NaN times 0 is NaN, and so the whole
batch is lost.
"""

# /// script
# dependencies = ["mlx", "numpy"]
#
# [tool.attention-core]
# thread = "ml-explore/mlx#2626"
# title = "SDPA error with masked full attention"
# property = "fully masked row"
# line = 4
# versions = "closed; right in 0.32.4"
# geometry = { B = 1, H = 1, M = 8, N = 8, D = 8, E = 8 }
# like = ["empty-row-mask"]
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
