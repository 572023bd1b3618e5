"""A mask of one row, for all queries, is not broadcast."""

# /// script
# dependencies = ["jax"]
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
