"""A row of False gives NaN."""

# /// script
# dependencies = ["tinygrad", "numpy"]
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
