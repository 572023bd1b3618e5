"""A cached step that is causal, too, attends to the first key alone.

The cache knows which keys exist, and masks the others. If a user leaves `is_causal=True` on while decoding, a
triangle is laid over the one query and all keys. From the top left it keeps key 0. A model that was trained right
then writes text as if it had read one word.
"""

# /// script
# dependencies = ["flax", "jax"]
#
# [tool.attention-core]
# thread = "google/flax#5591"
# title = "NNX MultiHeadAttention: is_causal=True during decode attends only to key position 0"
# property = "decode"
# line = 3
# versions = "open; 0.12.8 too"
# geometry = { B = 1, H = 2, M = 1, N = 5, D = 2, E = 2 }
# like = ["causal-after-cache"]
# ///

import jax
import jax.numpy as jnp
from flax import nnx

x = jax.random.normal(jax.random.key(0), (1, 5, 4))


def decode(is_causal):
    module = nnx.MultiHeadAttention(num_heads=2, in_features=4, decode=True, rngs=nnx.Rngs(0))
    module.init_cache((1, 5, 4))
    return jnp.stack([module(x[:, i : i + 1], is_causal=is_causal)[0, 0] for i in range(5)])


expected, got = decode(False), decode(True)
print("expected", expected[-1])
print("got     ", got[-1])
raise SystemExit(int(not jnp.allclose(got, expected, atol=1e-5)))
