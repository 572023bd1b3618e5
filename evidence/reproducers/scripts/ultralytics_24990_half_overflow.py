"""A product of query and key overflows in float16, although the scaled score fits."""

# /// script
# dependencies = ["keras", "numpy"]
# ///

import os

os.environ.setdefault("KERAS_BACKEND", "numpy")
import keras
import numpy as np

query, key = np.full((1, 1, 1, 64), 40, np.float16), np.full((1, 2, 1, 64), 40, np.float16)  # 102400, scaled 12800
value = np.stack([np.zeros((1, 64), np.float16), np.ones((1, 64), np.float16)])[None]
with np.errstate(all="ignore"):
    got = keras.ops.convert_to_numpy(keras.ops.dot_product_attention(query, key, value))
print("expected 0.5, the average of 0 and 1")
print("got     ", got.flatten()[0])
raise SystemExit(int(got.flatten()[0] != 0.5))
