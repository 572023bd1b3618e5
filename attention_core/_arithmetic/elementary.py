"""Functions as polynomials: elementary ones, which every library rounds in the same way, and the error function."""

from __future__ import annotations

import math

from .._arrays import Array, Namespace, dtype_name, scalar_like
from .._backend import is_concrete
from .exact import LN_2, LOG2_E, power_above, uncontracted


def horner(x: Array, coefficients: tuple[float, ...], xp: Namespace) -> Array:
    """A polynomial, its constant coefficient first: each product is `uncontracted` before a coefficient is added.

    Products whose values can be read are computed already, so no compiler contracts them.
    """
    compiled = not is_concrete(x)
    value = xp.multiply(x, coefficients[-1])
    for step, coefficient in enumerate(reversed(coefficients[:-1])):
        if step:
            value *= x
        if compiled:
            value = uncontracted(value, xp)
        value += coefficient
    return value


LEAST_EXPONENT = -700.0  # powers below 2**-700 are 0
_EXP2 = tuple((LN_2 / 2) ** n / math.factorial(n) for n in range(12))  # of 2**(f / 2), off by 2**-58


def exp2(x: Array, xp: Namespace) -> Array:
    r"""Powers :math:`2^x` for :math:`x \le 1000`, with a relative error below :math:`2^{-50}`; below 2^-700 they are 0.

    .. math:: 2^x = \bigl(2^{f / 2}\bigr)^2\, 2^n, \qquad n = \operatorname{round}(x), \quad f = x - n

    The square is not added to, so there is nothing to contract.
    """
    x = xp.maximum(x, scalar_like(LEAST_EXPONENT - 1.0, x, xp))
    whole = xp.round(x)
    root = horner(xp.subtract(x, whole), _EXP2, xp)
    root *= root
    root *= power_of_two(whole, xp)
    return xp.where(xp.less(x, LEAST_EXPONENT), 0.0, root)


def power_of_two(exponent: Array, xp: Namespace) -> Array:
    """Exact powers of two of integers: any library's exponential is near enough to one to be rounded to its bit."""
    power = xp.exp(xp.multiply(exponent, LN_2))
    carrier = xp.multiply(power, 2.0**52)
    carrier += power
    return xp.subtract(carrier, xp.subtract(carrier, power))


_LOG2_CENTRE, _LOG2_OF_CENTRE = 0.53, -0.9159357352115255
_LOG2 = tuple(2 / LN_2 / (2 * n + 1) for n in range(11))


def log2(x: Array, xp: Namespace) -> Array:
    r"""Logarithms to base 2 of positive numbers, off by less than :math:`2^{-45}`.

    .. math:: \log_2 x = e + \log_2 c + \tfrac{2}{\ln 2} \operatorname{artanh} \tfrac{m - c}{m + c}, \qquad x = m 2^e
    """
    power = power_above(x, xp)
    # The logarithm of a power of two: rounding removes the error of any library.
    exponent = xp.round(xp.multiply(xp.log(power), LOG2_E))
    mantissa = xp.divide(x, power)
    ratio = xp.divide(xp.subtract(mantissa, _LOG2_CENTRE), xp.add(mantissa, _LOG2_CENTRE))
    series = horner(uncontracted(xp.multiply(ratio, ratio), xp), _LOG2, xp)
    fraction = uncontracted(xp.multiply(ratio, series), xp)
    return xp.add(exponent, xp.add(fraction, _LOG2_OF_CENTRE))


_TANH = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075, -929569 / 638512875)


def tanh(x: Array, xp: Namespace) -> Array:
    r"""Hyperbolic tangents, with a relative error below :math:`2^{-46}`.

    Near 0 by Taylor's polynomial; from an eighth on by :math:`(1 - u) / (1 + u)` with :math:`u = e^{-2 |x|}`.
    """
    size = xp.abs(x)
    power = exp2(xp.multiply(size, -2 / LN_2), xp)
    far = xp.divide(xp.subtract(1.0, power), xp.add(1.0, power))
    near = xp.multiply(size, horner(uncontracted(xp.multiply(size, size), xp), _TANH, xp))
    value = xp.where(xp.less(size, 0.125), near, far)
    return xp.where(xp.less(x, 0.0), xp.negative(value), value)


_SINE = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(8))
_COSINE = tuple((-1) ** n / math.factorial(2 * n) for n in range(9))


def sine(x: Array, xp: Namespace) -> Array:
    r"""Sines of :math:`|x| \le 0.79`, with a relative error below :math:`2^{-51}`: Taylor's polynomial."""
    return xp.multiply(x, horner(uncontracted(xp.multiply(x, x), xp), _SINE, xp))


def cosine(x: Array, xp: Namespace) -> Array:
    r"""Cosines of :math:`|x| \le 0.79`, with a relative error below :math:`2^{-51}`: Taylor's polynomial."""
    return horner(uncontracted(xp.multiply(x, x), xp), _COSINE, xp)


# Coefficients of R in erfc(x) = t exp(-x^2) R(y), with t = 4 / (4 + x) and y = (16 t - 9) / 7 in [-1, 1] for x in
# [0, 28]. R is interpolated at 60 Chebyshev points, truncated after these terms and written in powers of y. The first
# omitted term is below 1e-9 (float32) and 1e-18 (float64) of R.
SERIES = {
    "float32": (
        0.30782209556544093, 0.2620658520882954, 0.19346236476306278, 0.12338097602737215, 0.06732561588501319,
        0.030853865433702277, 0.01146107447841896, 0.003194527804716802, 0.0005198244650921663,
        -3.630752781847974e-05, -4.539517613915464e-05, -6.121865389285436e-06, 1.6278774429743096e-06,
    ),
    "float64": (
        0.3078220955665328, 0.2620658545695961, 0.19346236466229277, 0.12338090596456514, 0.06732561736152422,
        0.03085443260075125, 0.011461066792527322, 0.003192548276896362, 0.0005198412064719702,
        -3.290849719070236e-05, -4.540629816369739e-05, -9.007577457749736e-06, 1.6148799606212437e-06,
        1.0525893748465244e-06, 2.415334476471916e-08, -9.334493802817247e-08, -1.1972887426300105e-08,
        8.289918021635265e-09, 1.6694998588844407e-09, -8.015363209567383e-10, -1.759959380407069e-10,
        7.856561467930714e-11, 1.1749861335326918e-11, -5.401586212922098e-12,
    ),
}  # fmt: skip


def erfc(x: Array, /, *, xp: Namespace) -> Array:
    r"""Complementary error function: the library's own where it has one.

    .. math:: \operatorname{erfc}(x) = \frac{2}{\sqrt\pi} \int_x^\infty e^{-u^2}\, du

    The relative error of the one computed here is below 8 ulps for x <= 3, and grows with x squared beyond.
    """
    if hasattr(xp, "erfc"):
        return xp.erfc(x)
    series = SERIES[dtype_name(x.dtype)]
    distance = xp.minimum(xp.abs(x), xp.full_like(x, 30.0))  # erfc(30) is 0 in float64, and 30^2 overflows nowhere
    t = xp.divide(4.0, xp.add(distance, 4.0))
    y = xp.subtract(xp.multiply(t, 16 / 7), 9 / 7)
    tail = xp.multiply(xp.multiply(t, horner(y, series, xp)), xp.exp(xp.negative(xp.multiply(distance, distance))))
    return xp.where(xp.less(x, 0.0), xp.subtract(2.0, tail), tail)
