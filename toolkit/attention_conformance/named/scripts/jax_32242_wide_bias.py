"""The gradient of a float32 bias with a bfloat16 query is NaN.

A bias is often kept in float32, and query, key and value in 16 bits. The output of the fused kernel was finite, and
the gradient of the bias was not. With a bias of bfloat16 it was. A refusal, or a cast, would both have been right.
"""

# /// script
# dependencies = ["jax"]
#
# [tool.attention-core]
# thread = "jax-ml/jax#32242"
# title = "cuDNN dot_product_attention NaNs with FP32 bias"
# property = "precision"
# line = 8
# versions = "0.8.0 on H100; closed"
# geometry = { B = 8, H = 4, M = 128, N = 128, D = 32, E = 32 }
# like = ["gradient-mask-and-bias"]
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
