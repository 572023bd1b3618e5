"""Elementary functions as polynomials, which every library rounds in the same way."""

from __future__ import annotations

import math

from .._arrays import Array, Namespace, scalar_like
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
    r"""Logarithms to base 2 of positive numbers, off by less than :math:`2^{-45}`."""
    _, exponent, fraction = split_log2(x, xp)
    return xp.add(exponent, fraction)


def split_log2(x: Array, xp: Namespace) -> tuple[Array, Array, Array]:
    r"""The power of two above positive numbers, its logarithm, and what that of the numbers is less.

    .. math:: \log_2 x = e + \log_2 c + \tfrac{2}{\ln 2} \operatorname{artanh} \tfrac{m - c}{m + c}, \qquad x = m 2^e
    """
    power = power_above(x, xp)
    # The logarithm of a power of two: rounding removes the error of any library.
    exponent = xp.round(xp.multiply(xp.log(power), LOG2_E))
    mantissa = xp.divide(x, power)
    ratio = xp.divide(xp.subtract(mantissa, _LOG2_CENTRE), xp.add(mantissa, _LOG2_CENTRE))
    series = horner(uncontracted(xp.multiply(ratio, ratio), xp), _LOG2, xp)
    fraction = uncontracted(xp.multiply(ratio, series), xp)
    return power, exponent, xp.add(fraction, _LOG2_OF_CENTRE)


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
