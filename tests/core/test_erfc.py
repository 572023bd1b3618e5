"""The Gaussian error linear unit against numbers of 40 digits."""

import mpmath
import numpy as np
import pytest

import attention_core as ac

POINTS = np.concatenate([np.linspace(-30, 30, 601), np.linspace(-1, 1, 201), [1e-300, -1e-300, 0.0, 1e10, -1e10]])


class Bare:
    """A namespace without what the standard lacks."""

    def __init__(self, xp):
        self._xp = xp

    def __getattr__(self, name):
        if name in ("erfc", "erf"):
            raise AttributeError(name)
        return getattr(self._xp, name)


@pytest.mark.parametrize("native", [True, False], ids=["native", "computed"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gelu_is_x_times_the_normal_distribution(put, get, xp, dtype, native):
    x = put(POINTS, dtype=dtype)
    numbers = get(x)
    got = get(ac.functions.gelu(x, xp=xp if native else Bare(xp)))
    assert got.dtype == numbers.dtype
    with mpmath.workdps(40):
        exact = [mpmath.mpf(float(n)) * mpmath.ncdf(mpmath.mpf(float(n))) for n in numbers]
        errors = [abs(mpmath.mpf(float(g)) - e) for g, e in zip(got, exact, strict=True)]
        ulps = [
            float(e / max(abs(x), mpmath.mpf("1e-30")) / np.finfo(dtype).eps)
            for e, x in zip(errors, exact, strict=True)
        ]
    near = np.abs(numbers) <= 3
    assert max(np.asarray(ulps)[near & (numbers != 0)]) < 24
    assert max(float(e) for e in errors) < 4 * np.finfo(dtype).eps * np.abs(numbers[np.abs(numbers) < 100]).max()


def test_far_out_it_is_zero_or_the_identity(put, get, xp):
    for namespace in (xp, Bare(xp)):
        got = get(ac.functions.gelu(put(np.array([-1e4, -40.0, 40.0, 1e4])), xp=namespace))
        np.testing.assert_array_equal(got, [0.0, 0.0, 40.0, 1e4])
