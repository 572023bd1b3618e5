"""With more queries than keys, a causal kernel reads beyond the last key."""

# /// script
# dependencies = ["jax"]
# ///

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu.attention import mha

random = np.random.default_rng(0)
query, key, value = (jnp.asarray(random.standard_normal((1, size, 2, 16), np.float32)) for size in (64, 32, 32))
scores = np.einsum("bmhd,bnhd->bhmn", query, key) / 4
weights = np.exp(np.where(np.arange(64)[:, None] >= np.arange(32), scores, -np.inf))
expected = np.einsum("bhmn,bnhd->bmhd", weights / weights.sum(-1, keepdims=True), value)
got = np.asarray(mha(query, key, value, None, sm_scale=0.25, causal=True, interpret=True))
print("expected", expected[0, 0, 0, :3])
print("got     ", got[0, 0, 0, :3], "and", np.isnan(got).sum(), "NaN of", got.size)
raise SystemExit(int(not np.allclose(got, expected, atol=1e-4)))
