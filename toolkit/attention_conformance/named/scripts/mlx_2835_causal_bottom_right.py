"""Causal counts from the bottom right, and PyTorch's from the top left.

With as many queries as keys, all libraries agree on the triangle. With 2 queries and 4 keys, MLX aligns it with the
last key, as decoding wants it, and PyTorch with the first. A model that is carried from one to the other changes
silently. Both say so in their documentation; here it is `Causal(offset=2)`.
"""

# /// script
# dependencies = ["mlx", "numpy"]
#
# [tool.attention-core]
# thread = "ml-explore/mlx#2835"
# title = "[BUG] Result of scaled_dot_product_attention does not match PyTorch when S_Q != S_KV, mask=\"causal\""
# property = "causal"
# line = 3
# versions = "open; as documented"
# geometry = { B = 1, H = 1, M = 2, N = 4, D = 4, E = 4 }
# like = ["causal-more-keys"]
# ///

import mlx.core as mx
import numpy as np

value = mx.array(np.broadcast_to(np.arange(4, dtype=np.float32)[:, None], (1, 1, 4, 4)).copy())
got = mx.fast.scaled_dot_product_attention(mx.zeros((1, 1, 2, 4)), value, value, scale=0.5, mask="causal")
got = np.array(got)[0, 0, :, 0]
print("expected [0.  0.5], from the top left")
print("got     ", got)
raise SystemExit(int(not np.allclose(got, [0, 0.5])))
