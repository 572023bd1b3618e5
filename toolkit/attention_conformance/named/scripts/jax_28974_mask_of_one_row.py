"""A mask of one row, for all queries, is not broadcast.

A padding mask has the shape (batch, 1, 1, keys), as all heads and queries share it. The call for cuDNN passes the
mask on as a bias, and a bias may not have one row: the call is an error about a bias that nobody gave. Users who
write the mask out for every query do not meet it, at the cost of memory.
"""

# /// script
# dependencies = ["jax"]
#
# [tool.attention-core]
# thread = "jax-ml/jax#28974"
# title = "jax.nn.dot_product_attention with implementation='cudnn' fails when only `mask`, but no `bias` provided"
# property = "mask"
# line = 1
# versions = "0.6.1 with cuDNN; open"
# geometry = { B = 4, H = 4, M = 32, N = 32, D = 16, E = 16 }
# like = ["mask"]
# ///

import jax
import jax.numpy as jnp
import numpy as np

implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
query, key, value = jax.random.normal(jax.random.key(0), (3, 4, 32, 4, 16), jnp.bfloat16)
mask = jnp.arange(32) < jnp.asarray([32, 20, 7, 1])[:, None, None, None]
full = jnp.broadcast_to(mask, (4, 4, 32, 32))
expected = jax.nn.dot_product_attention(query, key, value, mask=full, implementation="xla").astype(jnp.float32)
got = jax.nn.dot_product_attention(query, key, value, mask=mask, implementation=implementation).astype(jnp.float32)
print("expected", expected[1, 0, 0, :3])
print("got     ", got[1, 0, 0, :3], "from", implementation)
raise SystemExit(int(not np.allclose(got, expected, atol=2e-2)))
