"""Elementary functions as polynomials, which every library rounds in the same way."""

from __future__ import annotations

import math

from attention_core._arithmetic.exact import LN_2, LOG2_E, power_above, uncontracted
from attention_core._arrays import Array, Namespace, scalar_like
from attention_core._backend import is_concrete

# 2**x as a polynomial in x with constant 1. Squaring it eight times magnifies its relative error by 256: this is the
# polynomial of degree 5 whose error is then the smallest next to 2**-38 of the weight and 2**-57 together.
_EXP2_WEIGHT = (
    0.6931471805458885, 0.24022650453293592, 0.05550397257608798, 0.009614798216332866, 0.0012963421241698992,
)  # fmt: skip
SQUARES = 8


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


def exp2_weight(x: Array, xp: Namespace) -> Array:
    r"""Weights :math:`w = 2^{256 x}` for :math:`x \le 2^{-9}`, off by :math:`2^{-36} w + 2^{-56}`; 0 becomes exactly 1.

    .. math:: 2^{256 x} = (p(x))^{256}, \qquad p(x) \approx 2^x

    Squares are not added to, so there is nothing to contract. They magnify the relative error of p by 256.
    """
    x = xp.maximum(x, scalar_like(-0.25, x, xp))  # 2**-64 is below the last bit of a weight
    return _to_the_256(horner(x, (1.0, *_EXP2_WEIGHT), xp))


def _to_the_256(x: Array) -> Array:
    """The eighth square, in the memory of ``x`` where the library has in-place products."""
    for _ in range(SQUARES):
        x *= x
    return x


# 2**x for -0.6 <= x <= 0, with a relative error below 2**-50: Taylor's polynomial around -0.3.
_EXP2_CENTRE = -0.3
_EXP2 = (
    0.8122523963562356, 0.5630104584373838, 0.19512455594581743, 0.04508334527061822, 0.0078123484161348915,
    0.001083021455639171, 0.0001251155447437032, 1.2389069583331364e-05, 1.0734310814308888e-06,
    8.267174751324818e-08, 5.730368870077164e-09,
)  # fmt: skip


def exp2(x: Array, xp: Namespace) -> Array:
    r"""Powers :math:`2^x` for :math:`x \le 1`, with a relative error below :math:`2^{-42}`; below -150 as at -150."""
    x = xp.multiply(xp.maximum(x, scalar_like(-150.0, x, xp)), 2.0**-SQUARES)
    return _to_the_256(horner(xp.subtract(x, _EXP2_CENTRE), _EXP2, xp))


def exp2_tail(x: Array, xp: Namespace) -> Array:
    r"""Weights :math:`2^{256 x}` for :math:`x \le 2^{-9}`, with a relative error below :math:`2^{-41}`.

    Below :math:`2^{-290}` they are 0: no weight as small shows in a sum of float32 numbers.
    """
    root = exp2(xp.multiply(x, 128.0), xp)
    return xp.where(xp.less(x, -290 / 256), 0.0, xp.multiply(root, root))


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
    r"""Hyperbolic tangents, with a relative error below :math:`2^{-38}`.

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
