"""A learnt bias has no gradient.

Relative positions are a bias with a gradient. The backward pass of the fused kernel gave none, and later one for a
batch of 1 only. If zeros stand in its place, the parameter keeps its first value, and nothing reports it.
"""

# /// script
# dependencies = ["jax"]
#
# [tool.attention-core]
# thread = "jax-ml/jax#27184"
# title = "the gradient of bias in jax.nn.dot_product_attention"
# property = "gradient"
# line = 7
# versions = "open; cuDNN"
# geometry = { B = 2, H = 2, M = 64, N = 64, D = 64, E = 64 }
# like = ["gradient-mask-and-bias"]
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
