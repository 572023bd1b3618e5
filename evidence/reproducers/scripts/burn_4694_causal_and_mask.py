"""Causality and a mask together leave a query without keys."""

# /// script
# dependencies = ["jax"]
# ///

import jax
import jax.numpy as jnp

query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 4, 1, 4))
mask = jnp.ones((1, 1, 4, 4), bool).at[..., 0, 0].set(False)  # all that query 0 may attend to
got = jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True)
print("expected zeros, and no number of a masked value")
print("got     ", got[0, 0, 0], "where the average is", value[0, :, 0].mean(0))
raise SystemExit(int(bool((got[0, 0] != 0).any())))
