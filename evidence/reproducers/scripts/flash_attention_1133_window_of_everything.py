"""A window as long as the keys is causal attention, and a shorter one is not."""

# /// script
# dependencies = ["jax"]
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
