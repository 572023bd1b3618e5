"""Causality and a mask together leave a query without keys.

The mask keeps only later keys, and causality keeps only earlier ones. Neither empties a row by itself, so that no
check of the mask finds it. The fallback of burn gave NaN, and its fused kernel did not. JAX gives the average of all
values, the excluded ones included.
"""

# /// script
# dependencies = ["jax"]
#
# [tool.attention-core]
# thread = "tracel-ai/burn#4694"
# title = "attention_fallback produces NaN for fully-masked rows"
# property = "fully masked row"
# line = 4
# versions = "burn in Rust; the script asks jax"
# geometry = { B = 1, H = 1, M = 4, N = 4, D = 4, E = 4 }
# like = ["causal-and-mask"]
# ///

import jax
import jax.numpy as jnp

query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 4, 1, 4))
mask = jnp.ones((1, 1, 4, 4), bool).at[..., 0, 0].set(False)  # all that query 0 may attend to
got = jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True)
print("expected zeros, and no number of a masked value")
print("got     ", got[0, 0, 0], "where the average is", value[0, :, 0].mean(0))
raise SystemExit(int(bool((got[0, 0] != 0).any())))
