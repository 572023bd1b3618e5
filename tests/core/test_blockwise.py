"""Attention over blocks is attention: the same numbers and gradients, without all scores at once."""

import math
from functools import partial

import numpy as np
import pytest
from blockwise_helpers import (
    RUNS,
    TUNING,
    attention,
    qkv,
    quickly,
    weighted,
)

from attention_core.scores import ScoreMod


@pytest.fixture(autouse=True)
def small(backend, monkeypatch):
    """Blocks so small that there are several."""
    monkeypatch.setattr(backend, "tuning", TUNING if backend.loops.traced else RUNS)


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
