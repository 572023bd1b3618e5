"""ALiBi with 6 heads: the rates of 4 heads, and 2 of those of 8."""

# /// script
# dependencies = ["mlx", "numpy"]
# ///

import mlx.core as mx
import mlx.nn as nn
import numpy as np

got = -np.array(nn.ALiBi.create_alibi_matrix(1, 2, 6, 0, mx.float32)).reshape(6, -1)[:, 1]
expected = 2.0 ** -np.array([2, 4, 6, 8, 1, 3])
print("expected", expected)
print("got     ", got)
raise SystemExit(int(not np.allclose(got, expected)))
