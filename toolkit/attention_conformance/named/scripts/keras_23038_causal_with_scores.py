"""Asking for scores drops the causal mask.

The layer has two paths: the fused one, and one that can return the scores. On the second path, the causal mask was
not made. Asking for scores, dropout in training, or inputs of another rank took that path. The model saw the future
in training, and not in the test that used the fused path.
"""

# /// script
# dependencies = ["keras", "numpy"]
#
# [tool.attention-core]
# thread = "keras-team/keras#23038"
# title = "MultiHeadAttention silently drops the causal mask when `use_causal_mask=True` and the fused SDPA path is disabled (dropout > 0, `return_attention_scores=True`, or non-4D inputs) — regression in #22910"
# property = "causal"
# line = 3
# versions = "reported in June 2026; right in 3.15.1"
# geometry = { B = 1, H = 1, M = 4, N = 4, D = 4, E = 4 }
# like = ["weights-change-nothing"]
# ///

import os

os.environ.setdefault("KERAS_BACKEND", "numpy")
import keras
import numpy as np

keras.utils.set_random_seed(0)
layer, x = keras.layers.MultiHeadAttention(1, 4), np.random.default_rng(0).standard_normal((1, 4, 8), np.float32)
_, scores = layer(x, x, use_causal_mask=True, return_attention_scores=True)
above = np.triu(keras.ops.convert_to_numpy(scores)[0, 0], 1)
print("expected zeros above the diagonal")
print("got     ", above[0])
raise SystemExit(int(above.any()))
