"""A window is ignored unless a mask is given as well.

The function leaves early if there is nothing to exclude, and its list of what may exclude lacked the window. A call
with a window alone was full attention. The output is plausible, and only a comparison with a mask written by hand
shows the difference.
"""

# /// script
# dependencies = ["jax"]
#
# [tool.attention-core]
# thread = "jax-ml/jax#32357"
# title = "Fix: local_window_size ignored when mask is None in dot_product_attention"
# property = "window"
# line = 3
# versions = "mended in October 2025; right in 0.10.2"
# geometry = { B = 1, H = 1, M = 6, N = 6, D = 4, E = 4 }
# like = ["window"]
# ///

import jax
import jax.numpy as jnp
import numpy as np

query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 6, 1, 4))
distance = np.arange(6)[:, None] - np.arange(6)
mask = jnp.asarray((distance <= 2) & (distance >= 0))[None, None]
expected = jax.nn.dot_product_attention(query, key, value, mask=mask)
got = jax.nn.dot_product_attention(query, key, value, local_window_size=(2, 0))
print("expected", expected[0, -1, 0])
print("got     ", got[0, -1, 0])
raise SystemExit(int(not np.allclose(got, expected, atol=1e-5)))
