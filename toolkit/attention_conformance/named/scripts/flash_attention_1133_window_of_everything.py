"""A window as long as the keys is causal attention, and a shorter one is not.

A window of N - 1 keys to the left and none to the right hides exactly the future. The two options are written by
different code, so that comparing them needs no reference. In the thread a user doubted both ends of the window.
"""

# /// script
# dependencies = ["jax"]
#
# [tool.attention-core]
# thread = "Dao-AILab/flash-attention#1133"
# title = "correctness of `window_size`"
# property = "window"
# line = 3
# versions = "flash-attn; the script asks jax"
# geometry = { B = 1, H = 1, M = 6, N = 6, D = 4, E = 4 }
# like = ["window"]
# ///

import jax
import numpy as np

query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 6, 1, 4))
causal = jax.nn.dot_product_attention(query, key, value, is_causal=True)
windows = [jax.nn.dot_product_attention(query, key, value, local_window_size=(left, 0)) for left in (5, 4)]
got = [bool(np.allclose(window, causal, atol=1e-6)) for window in windows]
print("expected [True, False]: equal for 5 keys to the left, not for 4")
print("got     ", got)
raise SystemExit(int(got != [True, False]))
