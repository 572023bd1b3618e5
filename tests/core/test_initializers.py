"""Initial parameters: the same bits everywhere, and the distributions that they claim."""

import hashlib
import math

import mpmath
import numpy as np
import pytest

from attention_core import initializers

HASHES = {  # of float32 numbers, seed 2024, shape (64, 48): the same on every library
    "uniform": "d3d0060b84f2826a",
    "normal": "a9bd829e73ace1b1",
    "truncated_normal": "4740b9713a0a345a",
    "glorot_uniform": "da69c66ea0e1bca1",
}


@pytest.mark.parametrize("name", HASHES)
def test_the_bits_are_the_published_ones(name, backend, get, xp):
    make = getattr(initializers, name)
    modes = backend.modes if name == "uniform" else ("eager",)  # a table of 65,536 numbers is no code to compile
    for mode in modes:
        numbers = get(backend.compile(lambda: make(2024, (64, 48), xp=xp), mode=mode)())
        assert numbers.dtype == np.float32
        assert hashlib.sha256(numbers.astype("<f4").tobytes()).hexdigest()[:16] == HASHES[name]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_dtype_is_the_one_asked_for(dtype, backend, get, xp):
    if dtype in backend.dtypes:
        numbers = get(initializers.normal(1, (50,), stddev=0.02, dtype=dtype, xp=xp))
        assert numbers.dtype == dtype
        wide = get(initializers.normal(1, (50,), stddev=0.02, xp=xp))
        np.testing.assert_allclose(numbers, wide, rtol=2 * np.finfo(dtype).eps if dtype == "float16" else 1e-6)


@pytest.mark.parametrize("cut", [math.inf, 2.0])
def test_the_table_holds_the_quantiles_of_the_distribution(cut):
    table = np.array(initializers.quantile_table(cut))
    assert len(table) == 65536
    np.testing.assert_array_equal(table, -table[::-1])
    with mpmath.workdps(30):
        low = mpmath.ncdf(-cut)
        for part in range(0, 65536, 997):
            probability = low + (1 - 2 * low) * (2 * part + 1) / mpmath.mpf(2 * 65536)
            quantile = mpmath.sqrt(2) * mpmath.erfinv(2 * probability - 1)
            assert abs(quantile * 2**20 - int(table[part])) <= 0.5


def test_empty_shapes_are_shapes(get, xp):
    assert get(initializers.uniform(1, (0, 3), xp=xp)).shape == (0, 3)
    assert get(initializers.normal(1, (), xp=xp)).shape == ()
