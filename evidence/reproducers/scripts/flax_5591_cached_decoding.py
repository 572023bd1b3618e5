"""A cached step that is causal, too, attends to the first key alone."""

# /// script
# dependencies = ["flax", "jax"]
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
