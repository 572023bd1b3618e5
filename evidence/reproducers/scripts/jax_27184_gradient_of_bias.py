"""A learnt bias has no gradient."""

# /// script
# dependencies = ["jax"]
# ///

import jax
import jax.numpy as jnp
import numpy as np

implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 2, 64), jnp.bfloat16)
bias = jax.random.normal(jax.random.key(1), (2, 2, 64, 64), jnp.bfloat16)


def loss(bias, implementation):
    out = jax.nn.dot_product_attention(query, key, value, bias=bias, implementation=implementation)
    return out.astype(jnp.float32).sum()


expected, got = (jax.grad(loss)(bias, each).astype(jnp.float32) for each in ("xla", implementation))
print("expected", expected[0, 0, 0, :3])
print("got     ", got[0, 0, 0, :3], "from", implementation)
raise SystemExit(int(not expected.any() or not np.allclose(got, expected, atol=5e-2)))
