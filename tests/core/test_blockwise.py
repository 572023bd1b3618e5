"""Attention over blocks is attention: the same numbers and gradients, without all scores at once."""

import math
from functools import partial

import numpy as np
import pytest
from blockwise_helpers import (
    RUNS,
    TUNING,
    D,
    E,
    M,
    N,
    attention,
    qkv,
    quickly,
    weighted,
)
from call_table import quadratic

from attention_core.scores import ScoreMod


@pytest.fixture(autouse=True)
def small(backend, monkeypatch):
    """Blocks so small that there are several."""
    monkeypatch.setattr(backend, "tuning", TUNING if backend.loops.traced else RUNS)


@pytest.fixture
def are_small(backend, monkeypatch):
    """Whether blocks find the scores of a call small, and take their exponentials without a maximum."""
    differences, difference = [], type(backend.loops).exp_difference

    def recorded(*arguments):
        differences.append(arguments)
        return difference(*arguments)

    def asked(*arrays, **options):
        differences.clear()
        with np.errstate(invalid="ignore", over="ignore"):
            attention(*backend.from_numpy(arrays), **options, implementation="blockwise")
        return not differences

    monkeypatch.setattr(type(backend.loops), "exp_difference", recorded)
    return asked


@pytest.mark.needs(lambda backend: not backend.differentiates)  # others are not asked
@pytest.mark.parametrize(
    ("argument", "number", "small_scores"),
    [
        ("query", 31.9, True),
        ("query", 32.1, False),
        ("query", 1e200, False),
        ("query", math.nan, False),
        ("query", math.inf, False),
        ("key", math.inf, False),
        ("key", math.nan, False),
        ("query", 1e-30, True),
        ("key", 1e14, True),
        ("key", 1e16, False),
        ("value", 0.0, True),
        ("value", -2e-15, True),
        ("value", 9e-16, False),
        ("value", -2e15, False),
        ("value", 9e14, True),
        ("value", math.nan, False),
    ],
)
def test_scores_are_small_by_the_norms_of_a_head_and_all_values(argument, number, small_scores, are_small):
    query, key, value = np.zeros((1, 2, M, D)), np.zeros((1, 2, N, D)), np.ones((1, 2, N, E))
    query[0, 0, 3, 1], query[0, 1, 3, 1] = 1.0, 1e-3
    key[0, 0, 5, 2], key[0, 1, 5, 2] = 1.0, 1e3  # products with queries of another head do not count
    if argument == "key":
        query[0, 0] = 0.0  # not even times 0 may a key be infinite, nor so large
        query[0, 0, 3, 1] = 1e-13 if number == 1e14 else 0.0
    if argument == "value":
        value[0, 1, 2, 4] = number
    else:
        {"query": query, "key": key}[argument][
            0, 0, 3 if argument == "query" else 5, 1 if argument == "query" else 2
        ] = number
    assert are_small(query, key, value, scale=1.0) == small_scores


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"score_mod": quadratic}, {"bias": None}])
def test_changed_scores_are_not_small(options, backend, rng, are_small):
    if "bias" in options:
        options = {"bias": backend.from_numpy(np.ones((M, N)))}
    assert not are_small(*qkv(rng), **options)


@pytest.mark.parametrize("size", [1e-14, 1e14])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_small_scores_at_their_limit_lose_nothing(sign, size, backend, rng):
    """All scores of a query are near -32, or 32, and all values are small, or large."""
    query = sign * (31.0 + 0.9 * rng.random((1, 2, M, 1))) * np.ones(D) / D**0.5
    key = np.ones((1, 2, N, D)) / D**0.5 * (1 - 1e-3 * rng.random((1, 2, N, 1)))
    value = rng.standard_normal((1, 2, N, E)) * size
    found, exact = (
        backend.to_numpy(
            attention(*backend.from_numpy([query, key, value], dtype=dtype), scale=1.0, implementation=name)
        )
        for dtype, name in (("float32", "blockwise"), ("float64", "dense"))
    )
    np.testing.assert_allclose(found / size, exact / size, rtol=0, atol=2e-5)


@pytest.mark.needs("gradients")
def test_gradients_of_arrays_of_16_bits_are_added_up_in_float32(backend, rng):
    """Many blocks add to the gradient of one number, which rounding each time would spoil."""
    xp, put = backend.namespace, backend.from_numpy
    query, key, value = put([np.abs(x) for x in qkv(rng, (1,), 1, 1, 32, 45)], dtype="float32")
    weight = put(np.ones((1,)), dtype="bfloat16")

    def gradient(implementation):
        def measure(weight):
            mod = ScoreMod(weighted, (weight,))
            options = {"score_mod": mod, "return_logsumexp": True, "implementation": implementation}
            return xp.sum(attention(query, key, value, **options).logsumexp)

        return backend.to_numpy(quickly(backend, backend.value_and_grad(measure))(weight)[1][0]).astype(np.float64)

    dense = gradient("dense")
    np.testing.assert_allclose(gradient("blockwise"), dense, rtol=2.0**-7)


@pytest.mark.parametrize(
    ("implementation", "mode"), [("auto", "eager"), ("blockwise", "eager"), ("blockwise", "compiled")]
)
@pytest.mark.needs("gradients")
def test_the_logsumexp_of_a_large_bias_does_not_lose_the_sum(implementation, mode, backend, rng):
    """Scores that a bias makes equal have equal weights, also when those are computed once more for the gradients."""
    xp, put, shape = backend.namespace, backend.from_numpy, (1, 1, 32, 4)
    rows, count = 8, shape[-2]
    key, value, d_output = (rng.standard_normal(shape).astype("float32") for _ in range(3))

    def call(query, key, value, bias):
        return attention(query, key, value, bias=bias, implementation=implementation)

    call = call if mode == "eager" else backend.compile(call)

    def measure(query, value, bias):
        return xp.sum(xp.multiply(call(query, put(key), value, bias), put(d_output)))

    d_weights = d_output @ np.swapaxes(value, -2, -1)
    d_scores = (d_weights - d_weights.mean(axis=-1, keepdims=True)) / count
    for size in (-1e4, -1e9, -3e38, 1e9):
        bias = np.where(np.indices((count, count))[0] < rows, np.float32(size), np.float32(0.0))
        gradients = backend.value_and_grad(partial(measure, bias=put(bias)))(
            put(np.zeros(shape, "float32")), put(value)
        )
        d_query, d_value = map(backend.to_numpy, gradients[1])
        np.testing.assert_allclose(d_query, d_scores @ key / math.sqrt(shape[-1]), rtol=1e-4, atol=1e-6)
        d_values = np.broadcast_to(d_output.mean(-2, keepdims=True), shape)
        np.testing.assert_allclose(d_value, d_values, rtol=1e-4, atol=1e-6)
