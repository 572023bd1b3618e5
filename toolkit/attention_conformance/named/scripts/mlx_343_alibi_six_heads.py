"""ALiBi with 6 heads: the rates of 4 heads, and 2 of those of 8.

ALiBi lowers a score by the distance, at a rate for each head. The paper gives the rates for powers of two, and its
code a rule for other numbers. Libraries that apply the formula of powers of two to 6 heads fail, or train with other
rates than the model they load.
"""

# /// script
# dependencies = ["mlx", "numpy"]
#
# [tool.attention-core]
# thread = "ml-explore/mlx#343"
# title = "alibi error if log2(num_heads) is not an integer"
# property = "score function"
# line = 7
# versions = "closed; right in 0.32.4"
# geometry = { B = 1, H = 6, M = 1, N = 2 }
# like = ["alibi-offset-per-entry"]
# ///

import mlx.core as mx
import mlx.nn as nn
import numpy as np

got = -np.array(nn.ALiBi.create_alibi_matrix(1, 2, 6, 0, mx.float32)).reshape(6, -1)[:, 1]
expected = 2.0 ** -np.array([2, 4, 6, 8, 1, 3])
print("expected", expected)
print("got     ", got)
raise SystemExit(int(not np.allclose(got, expected)))
