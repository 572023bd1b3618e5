"""Normalization by the root of the mean square: the formula, its range, and its gradient."""

import numpy as np
import pytest

from attention_core.functions import rms_norm


def by_formula(scale, x, epsilon):
    x = x.astype(np.longdouble)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-15), ("float32", 5e-7)])
@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_formula(dtype, close, epsilon, put, get, rng):
    scale, x = rng.standard_normal(7).astype(dtype), rng.standard_normal((2, 3, 5, 7)).astype(dtype)
    result = get(rms_norm(put(scale), put(x), epsilon=epsilon))
    assert result.dtype == dtype
    np.testing.assert_allclose(result, by_formula(scale, x, epsilon), rtol=close, atol=0)


@pytest.mark.parametrize(("dtype", "exponents"), [("float32", (-10, 59, 61, 126)), ("float64", (-10, 499, 501, 1022))])
def test_squares_may_overflow(dtype, exponents, put, get, rng):
    """Where epsilon is negligible, a power of two as a factor changes no bit of the result."""
    scale, x = rng.standard_normal(6).astype(dtype), rng.uniform(-1.9, 1.9, (3, 6)).astype(dtype)
    expected = get(rms_norm(put(scale), put(x), epsilon=1e-35))
    for exponent in exponents:
        grown = np.ldexp(x, exponent)
        np.testing.assert_array_equal(get(rms_norm(put(scale), put(grown), epsilon=1e-35)), expected)
