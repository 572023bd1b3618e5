"""Rotary position embedding, against the formula in exact arithmetic."""

import importlib
from fractions import Fraction

import mpmath
import numpy as np
import pytest

from attention_core.functions import rotary_embedding

FAR = np.asarray(
    [0, 1, -1, 5, 1000, -4097, 2**16 - 1, 2**17 + 3, 2**20 - 7, 2**24 + 1, 2**31 - 1, -(2**31)], dtype=np.int32
)
WIDTH = 16


DIVISORS = (0.25, 1, 1, 1.5, 3.1, 8, 8, 1e6)


def tables(positions, base, divisors=None, width=WIDTH):
    """Cosine and sine of all angles, from 60 digits."""
    with mpmath.workdps(60):
        powers = (mpmath.mpf(base) ** (mpmath.mpf(-2 * i) / width) for i in range(width // 2))
        frequencies = [power / d for power, d in zip(powers, divisors or [1] * (width // 2), strict=True)]
        angles = [[int(p) * frequency for frequency in frequencies] for p in positions]
        return tuple(np.asarray([[float(f(a)) for a in row] for row in angles]) for f in (mpmath.cos, mpmath.sin))


def by_formula(x, cos, sin):
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def in_units(error, x):
    """An error in units of the last place of the length of its pair of channels, halves apart."""
    half = x.shape[-1] // 2
    length = np.hypot(*(part.astype(np.float64) for part in (x[..., :half], x[..., half:])))
    unit = float(np.finfo(x.dtype).eps) * 2.0 ** np.floor(np.log2(length))
    return error / np.concatenate([unit, unit], axis=-1)


@pytest.mark.parametrize(("base", "divisors"), [(10000.0, None), (500000.0, DIVISORS), (1, None)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_positions_cost_no_accuracy(dtype, base, divisors, backend, rng):
    x = rng.standard_normal((3, len(FAR), WIDTH)).astype(dtype)
    result = backend.to_numpy(rotary_embedding(*backend.from_numpy((x, FAR)), base=base, divisors=divisors))
    assert result.dtype == x.dtype
    expected = by_formula(x.astype(np.longdouble), *tables(FAR, base, divisors))
    assert np.max(np.abs(in_units((result - expected).astype(np.float64), x))) < 2.5


def test_angles_that_are_kept_have_the_bits_of_those_that_are_computed(put, get, rng):
    x = rng.standard_normal((3, len(FAR), WIDTH)).astype(np.float32)
    same = {"divisors": DIVISORS}, {"divisors": tuple(map(Fraction, DIVISORS))}
    calls = [each for of in same for each in ({}, {"base": 500.0}, of, {"width": 4}, {"interleaved": True})]
    results = [get(rotary_embedding(put(x), put(FAR), **options)).tobytes() for options in calls]
    assert results[:5] == results[5:]
    assert len(set(results)) == 5


@pytest.mark.needs("jax")
def test_integers_of_32_bits_count_modulo_a_turn(rng):
    """JAX has none of 64 bits unless told."""
    jax = importlib.import_module("jax")
    x = rng.standard_normal((3, len(FAR), WIDTH)).astype(np.float32)
    with jax.enable_x64(False):
        inputs = jax.numpy.asarray(x), jax.numpy.asarray(FAR)
        results = [rotary_embedding(*inputs, arithmetic=each) for each in ("fast", "reproducible")]
        results = [np.asarray(each) for each in (*results, jax.jit(rotary_embedding)(*inputs))]
    expected = by_formula(x.astype(np.float64), *tables(FAR, 10000.0))
    for result in results:
        assert np.max(np.abs(in_units(result - expected, x))) < 2.5


def test_interleaved_is_another_order_of_channels(put, get, rng):
    x, positions = rng.standard_normal((2, 3, 5, 8)), put(FAR[1:6])
    apart = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    expected = get(rotary_embedding(put(apart), positions))
    result = get(rotary_embedding(put(x), positions, interleaved=True))
    np.testing.assert_array_equal(np.concatenate([result[..., 0::2], result[..., 1::2]], axis=-1), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_channels_beyond_the_width_are_kept(interleaved, put, get, rng):
    x, positions = rng.standard_normal((3, 5, 9)), put(FAR[1:6])
    result = get(rotary_embedding(put(x), positions, width=6, interleaved=interleaved))
    np.testing.assert_array_equal(result[..., 6:], x[..., 6:])
    expected = rotary_embedding(put(x[..., :6].copy()), positions, interleaved=interleaved)
    np.testing.assert_array_equal(result[..., :6], get(expected))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int64", "uint8"])
def test_positions_may_differ_between_samples_and_be_of_any_integer_type(dtype, put, get, rng):
    x, positions = rng.standard_normal((2, 3, 5, 8)), rng.integers(0, 100, (2, 5)).astype(dtype)
    result = get(rotary_embedding(put(x), put(positions)))
    for sample in range(2):
        expected = get(rotary_embedding(put(x[sample]), put(positions[sample].astype(np.int32))))
        np.testing.assert_array_equal(result[sample], expected)
