"""A row of False gives NaN.

Each library meets this row, and many learn of it from a user. burn-flex gave 0 in debug builds and NaN in release
builds. The mask of tinygrad becomes 0 and -inf, and the softmax of a row of -inf is NaN.
"""

# /// script
# dependencies = ["tinygrad", "numpy"]
#
# [tool.attention-core]
# thread = "antimora/burn-flex#16"
# title = "Flash attention produces NaN in release builds when all positions are masked"
# property = "fully masked row"
# line = 4
# versions = "burn-flex in Rust; the script asks tinygrad"
# geometry = { B = 1, H = 1, M = 2, N = 3, D = 4, E = 4 }
# like = ["empty-row-mask"]
# ///

import os

os.environ.setdefault("DEV", "PYTHON")
import numpy as np
from tinygrad import Tensor

arrays = [Tensor(np.ones((1, 1, size, 4), np.float32)) for size in (2, 3, 3)]
mask = Tensor(np.array([[True, True, True], [False, False, False]])[None, None])
got = arrays[0].scaled_dot_product_attention(*arrays[1:], attn_mask=mask).numpy()
print("expected [0. 0. 0. 0.] in the masked row")
print("got     ", got[0, 0, 1])
raise SystemExit(int(not (got[0, 0, 1] == 0).all()))
