"""Calls under settings of JAX that refuse to promote ranks or dtypes, to bring numbers to a device, or to keep traces."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_table import Sizes, options_of

import attention_core as ac
import attention_jax
import attention_models as models

SIZES = Sizes((2,), 2, 1, 20, 20, 4, 4)
QUERY, KEY = (jnp.asarray(x, jnp.float32) for x in SIZES.arrays(np.random.default_rng(3))[:2])
CALLS = {
    name: options_of(name, SIZES, lambda x: jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else None))
    for name in ("none", "causal", "window", "cache", "segments", "bias and mask", "dropout")
}
WAYS = {
    "dense": {"implementation": "dense"},
    "blocks": {"implementation": "blockwise"},
    "reproducible": {"arithmetic": "reproducible"},
}


@pytest.fixture
def strictly():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_attention_promotes_nothing(name, way, strictly):
    """Neither traced, which tells it, nor with arrays that can be read, nor where gradients are traced later."""

    def loss(query, key):
        return jnp.sum(jnp.square(ac.scaled_dot_product_attention(query, key, key, **CALLS[name], **WAYS[way])))

    gradient = jax.grad(loss, argnums=(0, 1))
    jax.eval_shape(gradient, QUERY, KEY)
    jax.eval_shape(jax.grad(jax.jit(loss), argnums=(0, 1)), QUERY, KEY)
    if name == "cache":
        gradient(QUERY, KEY)


@pytest.mark.parametrize("name", CALLS)
def test_attention_computes_where_the_user_brings_nothing_to_the_device(name):
    """Gradients do not, nor does `jax.nn.softmax`: JAX brings numbers there by itself."""
    expected = ac.scaled_dot_product_attention(QUERY, KEY, KEY, **CALLS[name])
    with jax.transfer_guard("disallow"):
        found = ac.scaled_dot_product_attention(QUERY, KEY, KEY, **CALLS[name])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_no_program_keeps_an_array_of_its_trace(name, way):
    def loss(query, key):
        return jnp.sum(ac.scaled_dot_product_attention(query, key, key, **CALLS[name], **WAYS[way]))

    gc.freeze()  # for each trace, JAX goes through all objects that are not
    with jax.checking_leaks():
        jax.jit(jax.grad(loss, argnums=(0, 1))).lower(QUERY, KEY)
    gc.unfreeze()


def test_a_cache_grows_where_the_user_brings_nothing_to_the_device():
    cache, lengths = ac.cache.empty_cache((2,), 1, 24, 4, ragged=True, xp=jnp), jnp.asarray([3, 20])
    with jax.transfer_guard("disallow"):
        cache = ac.cache.append(cache, KEY, KEY, num_new=lengths)
        found = ac.scaled_dot_product_attention(QUERY, cache.key, cache.value, mask=ac.cache.cache_mask(cache, 20))
        rows = ac.KeyLengths(lengths) & ac.Causal()
    np.testing.assert_array_equal(cache.length, lengths)
    expected = ac.scaled_dot_product_attention(QUERY, KEY, KEY, mask=rows & ac.Causal(offset=lengths - 20))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_masks_are_made_where_the_user_brings_nothing_to_the_device():
    lengths = jnp.asarray([3, 20])
    rule = ac.KeyLengths(lengths) & ac.SlidingWindow(left=2, right=1)
    expected = rule.to_array(20, 20, like=lengths, xp=None)  # the first time, array-api-compat makes an array
    with jax.transfer_guard("disallow"):
        found = rule.to_array(20, 20, like=lengths, xp=None)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("arithmetic", ["fast", "reproducible"])
def test_an_encoder_layer_promotes_nothing(arithmetic, strictly):
    layer = attention_jax.EncoderLayer.init(0, 8, 2, 16, arithmetic=arithmetic)
    jax.eval_shape(jax.grad(lambda x: jnp.sum(jnp.square(layer(x)))), jnp.ones((2, 5, 8), jnp.float32))


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_texts_are_generated_where_the_user_brings_nothing_to_the_device(mode):
    model = models.Decoder(7, 8, 2, 6, 1)
    prompts, lengths = jnp.asarray([[1, 2, 3], [4, 5, 0]]), jnp.asarray([3, 2])
    parameters = model.init(0, xp=jnp)
    options = {"prompt_lengths": lengths, "stop_ids": (6,), "mode": mode, "max_new_tokens": 3}
    expected = models.generate(model, parameters, prompts, **options)
    with jax.transfer_guard("disallow"):
        found = models.generate(model, parameters, prompts, **options)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
