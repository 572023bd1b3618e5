"""The decoder as a pytree of JAX, whose cache is carried through a loop."""

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax
from attention_core import layers


def test_a_cache_is_carried_through_scan():
    model = attention_jax.Decoder.init(3, 11, 8, 2, 6, 1, num_key_value_heads=1)
    start = layers.named_arrays(model.definition.init(3, xp=np))
    for name, array in layers.named_arrays(model.parameters).items():
        np.testing.assert_array_equal(array, start[name])
    ids = jnp.asarray([[3, 1, 4, 1], [5, 9, 2, 6]])

    def step(cache, token):
        logits, cache = model(token[:, None], cache=cache)
        return cache, logits[:, 0]

    cache, logits = jax.lax.scan(step, model.definition.empty_cache((2,), 5, xp=jnp), ids.T)
    np.testing.assert_allclose(jnp.swapaxes(logits, 0, 1), model(ids), rtol=0, atol=1e-5)
    assert int(cache.length) == 4
    norm = attention_jax.RMSNorm.init(0, 8)
    assert (
        norm(jnp.ones((2, 8), "float32")).shape
        == attention_jax.GatedFeedForward.init(0, 8, 6)(jnp.ones((2, 8), "float32")).shape
    )
