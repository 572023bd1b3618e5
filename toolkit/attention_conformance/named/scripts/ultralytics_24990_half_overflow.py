"""A product of query and key overflows in float16, although the scaled score fits.

The largest number of float16 is 65504. If the product of query and key is formed first and scaled afterwards, a score
of 8000 arises from 64000, and a little more is infinity. The softmax of infinity is NaN. Scaling the query first
costs nothing and avoids it. Mixed precision reaches this in training.
"""

# /// script
# dependencies = ["keras", "numpy"]
#
# [tool.attention-core]
# thread = "ultralytics/ultralytics#24990"
# title = "Pre-scale attention query to prevent fp16 overflow"
# property = "range"
# line = 7
# versions = "YOLO before June 2026; the script asks keras on NumPy"
# geometry = { B = 1, H = 1, M = 1, N = 2, D = 64, E = 64 }
# like = ["15-half-overflow"]
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
