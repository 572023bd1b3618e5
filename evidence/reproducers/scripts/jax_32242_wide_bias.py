"""The gradient of a float32 bias with a bfloat16 query is NaN."""

# /// script
# dependencies = ["jax"]
# ///

import jax
import jax.numpy as jnp
import numpy as np

implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
x = jax.random.normal(jax.random.key(0), (8, 128, 4, 32), jnp.bfloat16)
bias = jax.random.normal(jax.random.key(1), (1, 4, 128, 128))


def loss(bias):
    return jax.nn.dot_product_attention(x, x, x, bias=bias, implementation=implementation).sum()


got = jax.grad(loss)(bias)
print("expected a finite gradient")
print("got     ", int(np.isnan(got).sum()), "NaN of", got.size, "from", implementation)
raise SystemExit(int(not np.isfinite(got).all()))
