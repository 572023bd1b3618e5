"""Sinks that take nearly all, and those of a layer."""

import numpy as np
import pytest

import attention_core as ac
from attention_core.layers import MultiHeadAttention

H, M, N, D = 2, 3, 5, 4
ALLOWED = np.ones((M, N), bool)
ALLOWED[1] = False


def arrays(rng, dtype="float64"):
    return [rng.standard_normal((1, H, length, D)).astype(dtype) for length in (M, N, N)]


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "auto"])
def test_the_share_next_to_a_sink_far_above_all_scores_keeps_its_digits(implementation, put, get, rng):
    r"""A share of :math:`e^{-70}` is no 0 in float32, in outputs and weights alike."""
    query, key, value = inputs = arrays(rng, "float32")
    sinks = np.asarray([70, 72], "float32")
    exponentials = np.exp(np.einsum("bhmd,bhnd->bhmn", query, key).astype(float)) * ALLOWED
    weights = exponentials / (np.exp(sinks.astype(float))[:, None, None] + exponentials.sum(-1, keepdims=True))
    weighted = implementation != "blockwise"
    options = {"mask": put(ALLOWED), "implementation": implementation, "scale": 1.0}
    result = ac.scaled_dot_product_attention(
        *put(inputs), sinks=put(sinks), return_logsumexp=True, return_weights=weighted, **options
    )
    bound = 1e-5 * (weights @ np.abs(value))
    assert np.all(np.abs(get(result.output) - weights @ value) <= bound)
    if weighted:
        np.testing.assert_allclose(get(result.weights), weights, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_the_share_next_to_a_sink_as_large_as_scores_of_10000_keeps_its_digits(implementation, put, get, rng):
    """A logsumexp of 10,000 has no place for them in float32."""
    *arrays_of_zeros, value = (0 * each for each in arrays(rng, "float32"))
    value += rng.random(value.shape, np.float32)
    bias, sinks = ((1e4 + rng.standard_normal(shape)).astype(np.float32) for shape in ((H, M, N), (H,)))
    exponentials = np.exp(bias.astype(float) - 1e4)
    weights = exponentials / (np.exp(sinks.astype(float) - 1e4)[:, None, None] + exponentials.sum(-1, keepdims=True))
    options = {"bias": put(bias), "sinks": put(sinks), "implementation": implementation}
    found = ac.scaled_dot_product_attention(*map(put, (*arrays_of_zeros, value)), **options)
    np.testing.assert_allclose(get(found), weights @ value, rtol=2e-6)


def test_a_layer_with_zero_attention_gives_zero_to_fully_masked_rows(put, get, rng):
    layer = MultiHeadAttention(D, 2, zero_attention=True, bias=False, output=False)
    x = put(rng.standard_normal((1, M, D)).astype("float32"))
    result = layer(put(layer.init(0, xp=np)), x, key_mask=put(np.zeros((1, M), bool)), return_weights=True)
    np.testing.assert_array_equal(get(result.output), np.zeros((1, M, D)))
    np.testing.assert_array_equal(get(result.weights), np.zeros((1, 2, M, M)))
