"""Sinks of minus infinity, which take no share, and sinks that take nearly all: with fully masked rows in every form."""

import numpy as np
import pytest
from blockwise_helpers import quickly
from pairwise import pairwise

import attention_core as ac
from attention_core.layers import MultiHeadAttention

H, M, N, D = 2, 3, 5, 4
ROW = 1  # which no mask here lets attend
SINKS = {"one": [-np.inf, 0.5], "all": [-np.inf, -np.inf]}
ALLOWED = np.ones((M, N), bool)
ALLOWED[ROW] = False
FORMS = {
    "array": lambda put, dtype: {"mask": put(ALLOWED)},
    "bias": lambda put, dtype: {"bias": put(np.where(ALLOWED, 0, -np.inf).astype(dtype))},
    "function": lambda put, dtype: {"mask": ac.MaskFunction(lambda batch, head, query, key: query != ROW)},
    "lengths": lambda put, dtype: {"mask": ac.KeyLengths(0)},
    "causal": lambda put, dtype: {"mask": ac.Causal(offset=-2)},
}
IMPLEMENTATIONS = ["dense", "blockwise", "auto"]
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_pair = pairwise(form=FORMS, implementation=IMPLEMENTATIONS, name=SINKS)


def arrays(rng, dtype="float64"):
    return [rng.standard_normal((1, H, length, D)).astype(dtype) for length in (M, N, N)]


@every_pair
def test_a_sink_of_minus_infinity_with_fully_masked_rows_is_no_sink(name, implementation, form, put, get, rng):
    """Of the row nothing is left but the other head's sink: output 0, weights 0, and the logsumexp of the sink."""
    sinks = np.asarray(SINKS[name])
    options = FORMS[form](put, "float64") | {"implementation": implementation, "return_logsumexp": True}
    weighted = implementation != "blockwise"
    result = ac.scaled_dot_product_attention(*put(arrays(rng)), sinks=put(sinks), return_weights=weighted, **options)
    np.testing.assert_array_equal(get(result.output)[0, :, ROW], np.zeros((H, D)))
    np.testing.assert_array_equal(get(result.logsumexp)[0, :, ROW], sinks)
    if weighted:
        np.testing.assert_array_equal(get(result.weights)[0, :, ROW], np.zeros((H, N)))


@every_implementation
def test_the_share_next_to_a_sink_far_above_all_scores_keeps_its_digits(implementation, put, get, rng):
    r"""A share of :math:`e^{-70}` is no 0 in float32, in outputs and weights alike."""
    query, key, value = inputs = arrays(rng, "float32")
    sinks = np.asarray([70, 72], "float32")
    exponentials = np.exp(np.einsum("bhmd,bhnd->bhmn", query, key).astype(float)) * ALLOWED
    weights = exponentials / (np.exp(sinks.astype(float))[:, None, None] + exponentials.sum(-1, keepdims=True))
    weighted = implementation != "blockwise"
    options = FORMS["array"](put, "float32") | {"implementation": implementation, "scale": 1.0}
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


@pytest.mark.needs("gradients")
@every_pair
def test_gradients_with_a_sink_of_minus_infinity_are_finite(name, implementation, form, backend, put, get, rng):
    """And 0 for the sink, for the query of the row, and for keys and values to which nothing attends."""
    xp, options = backend.namespace, FORMS[form](put, "float32") | {"implementation": implementation}
    weighted = implementation != "blockwise"

    def loss(*inputs):
        *inputs, sinks = inputs
        result = ac.scaled_dot_product_attention(
            *inputs, sinks=sinks, return_logsumexp=True, return_weights=weighted, **options
        )
        reached = xp.where(xp.isfinite(result.logsumexp), result.logsumexp, 0.0)
        total = xp.add(xp.sum(xp.multiply(result.output, result.output)), xp.sum(reached))
        return xp.add(total, xp.sum(xp.multiply(result.weights, result.weights))) if weighted else total

    sinks = np.asarray(SINKS[name], "float32")
    _, gradients = quickly(backend, backend.value_and_grad(loss))(*put([*arrays(rng, "float32"), sinks]))
    d_query, *_, d_sinks = gradients = get(gradients)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    np.testing.assert_array_equal(d_query[0, :, ROW], np.zeros((H, D)))
    np.testing.assert_array_equal(d_sinks[np.isinf(sinks)], 0)


def test_a_layer_with_zero_attention_gives_zero_to_fully_masked_rows(put, get, rng):
    layer = MultiHeadAttention(D, 2, zero_attention=True, bias=False, output=False)
    x = put(rng.standard_normal((1, M, D)).astype("float32"))
    result = layer(put(layer.init(0, xp=np)), x, key_mask=put(np.zeros((1, M), bool)), return_weights=True)
    np.testing.assert_array_equal(get(result.output), np.zeros((1, M, D)))
    np.testing.assert_array_equal(get(result.weights), np.zeros((1, 2, M, M)))
