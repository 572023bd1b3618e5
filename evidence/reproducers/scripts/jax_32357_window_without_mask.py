"""A window is ignored unless a mask is given as well."""

# /// script
# dependencies = ["jax"]
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
