"""With more queries than keys, a causal kernel reads beyond the last key.

The kernel visits key blocks up to the last query of its block, and does not stop at the last key. With 64 queries and
32 keys, the second block of keys lies outside the array. Pallas' interpreter fills such reads with NaN, and the whole
block of queries is NaN, also its early rows. On a GPU the kernel would read the memory that follows. The thread is
about the same two lengths without causality, which is mended. No thread about this form was found.
"""

# /// script
# dependencies = ["jax"]
#
# [tool.attention-core]
# thread = "jax-ml/jax#24491"
# title = "Pallas Attention Kernel Wrong results when length of query != length of KV"
# property = "causal"
# line = 3
# versions = "the form without causality is mended; this form is in 0.10.2"
# geometry = { B = 1, H = 2, M = 64, N = 32, D = 16, E = 16 }
# like = ["causal-more-queries"]
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
