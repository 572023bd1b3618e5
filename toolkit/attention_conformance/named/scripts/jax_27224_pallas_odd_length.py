"""A length of 192 is not a multiple of the block of 128, and the rest is computed from other memory.

Kernels work in blocks of 64 or 128 keys, and the last block of a sequence is seldom full. What lies behind the last
key has to be masked. This kernel did not mask it, so that every length but a multiple of 128 gave wrong rows. Tests
with lengths of 128 and 1024 pass. Newer versions refuse such lengths with an error, which is right for a user.
"""

# /// script
# dependencies = ["jax"]
#
# [tool.attention-core]
# thread = "jax-ml/jax#27224"
# title = "Pallas GPU FlashAttention forward only works when sequence lengths are multiples of block size"
# property = "sizes"
# line = 0
# versions = "open; 0.10.2 refuses"
# geometry = { B = 1, H = 2, M = 192, N = 192, D = 16, E = 16 }
# ///

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu.attention import mha

random = np.random.default_rng(0)
query, key, value = (jnp.asarray(random.standard_normal((1, 192, 2, 16), np.float32)) for _ in range(3))
weights = np.exp(np.einsum("bmhd,bnhd->bhmn", query, key) / 4)
expected = np.einsum("bhmn,bnhd->bmhd", weights / weights.sum(-1, keepdims=True), value)
try:
    got = np.asarray(mha(query, key, value, None, sm_scale=0.25, interpret=True))
except ValueError as error:
    print("refused:", error)
    raise SystemExit(0) from None
print("expected", expected[0, -1, 0, :3])
print("got     ", got[0, -1, 0, :3])
raise SystemExit(int(not np.allclose(got, expected, atol=1e-4)))
