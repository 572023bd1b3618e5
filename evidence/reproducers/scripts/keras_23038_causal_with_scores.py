"""Asking for scores drops the causal mask."""

# /// script
# dependencies = ["keras", "numpy"]
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
