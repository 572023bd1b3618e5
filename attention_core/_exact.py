r"""Arithmetic in which order does not matter: the same bits from every library, compiler and device with IEEE float64.

Results differ between libraries for four reasons, and each is met by one rule here:

* *Sums in another order round differently.* All sums of products are sums of integers that float64 holds exactly
  (`slices`), so that no order, blocking, thread count or fused multiplication can change them.
* *Compilers contract* ``a * b + c`` *into one rounding.* A product that is rounded is passed through `settle`, or
  another maximum, minimum, rounding or choice, before anything is added to it; a product by a power of two is exact.
* *Elementary functions differ in the last places.* `exp2_weight`, `exp2`, `log2`, `tanh`, `sine` and `cosine` are
  polynomials of
  products and sums that float64 rounds in one way only. A division and a square root are rounded correctly
  everywhere; nothing is divided by a constant, another quotient, a root, or what is broadcast (`quotient`), which
  compilers rewrite.
* *Subnormal numbers are flushed to zero by some.* All intermediate numbers are normal; `rounded` gives 0 where a
  result of float32 would be subnormal, and what is subnormal in float32 counts as 0 (`wide`).

References
----------
K. Ozaki et al., "Error-free transformations of matrix multiplication by using fast routines of matrix multiplication
and its applications", 2012. G. W. Veltkamp's splitting: S. Boldo, "Pitfalls of a full floating-point proof", 2006.
"""

from __future__ import annotations

import math
from typing import Any

from attention_core._namespace import beside, is_concrete
from attention_core._typing import Array, Namespace

__all__ = [
    "CARRY",
    "LN_2",
    "LOG2_E",
    "LONGEST",
    "SMALLEST",
    "bits_for",
    "carried",
    "cosine",
    "dots",
    "exp2",
    "exp2_weight",
    "horner",
    "log2",
    "log2_above",
    "number",
    "peak",
    "power_above",
    "quotient",
    "rounded",
    "settle",
    "sine",
    "slices",
    "tanh",
    "total",
    "wide",
]

PRECISION = 53  # bits of float64: integers up to 2**53 are added exactly
LONGEST = 4096  # terms that one product of matrices adds up; longer sums are carried on in two parts
CARRY = 2.0**26
SMALLEST, BEYOND = 2.0**-126, 2.0**128  # the least normal float32, and what none reaches
LARGEST = 1.7976931348623157e308
LN_2, LOG2_E = 0.6931471805599453, 1.4426950408889634  # written out, as a C library may round its own another way

# 2**x as a polynomial in x with constant 1, so that the eighth square of p(s / 256) is off 2**s by at most 2**-38.6 for
# every s <= 0: the error of the best one of degree 4, weighted with 256 * 2**s, in which the squares magnify it.
WEIGHT = (0.6931471805392166, 0.240226495453517, 0.055502413791724985, 0.009532258250566078)
SQUARES = 8


def number(value: float, like: Array, xp: Namespace) -> Array:
    """A 0-d array of float64 beside another array."""
    return xp.full((), value, dtype=xp.float64, **beside(like))


def settle(x: Array, xp: Namespace) -> Array:
    """The same numbers, with no compiler able to contract the product they are with a sum that follows."""
    return xp.maximum(x, number(-LARGEST, x, xp))


def wide(x: Array, xp: Namespace) -> Array:
    """Numbers of at most 32 bits as float64, in which what is subnormal in float32 is 0: exact, but for that."""
    x = xp.astype(x, xp.float64)
    return xp.where(xp.less(xp.abs(x), SMALLEST), 0.0, x)


def quotient(x: Array, divisor: Array, xp: Namespace) -> Array:
    """Numbers over fewer ones, to which they broadcast: by reciprocals, which XLA takes then, whatever is written."""
    return xp.multiply(x, settle(xp.divide(1.0, divisor), xp))


def rounded(x: Array, xp: Namespace) -> Array:
    r"""Round float64 once to float32, to the nearest; below :math:`2^{-126}` to 0, beyond the largest to infinity.

    The sum :math:`c = 2^{29} x + x` has one rounding, as its product is exact, and :math:`c - (c - x)` is x to 24 bits
    (Veltkamp's splitting). What is then converted has 24 bits already: a compiler may leave the conversion out.
    """
    x = xp.minimum(xp.maximum(x, number(-2 * BEYOND, x, xp)), number(2 * BEYOND, x, xp))  # which settles it too
    short = xp.multiply(x, 2.0 ** (PRECISION - 24))
    short += x
    short -= xp.subtract(short, x)
    short = xp.where(xp.less(xp.abs(short), SMALLEST), 0.0, short)  # so does -0, whose sign depends on the order
    short = xp.where(xp.greater_equal(short, BEYOND), math.inf, short)
    short = xp.where(xp.less_equal(short, -BEYOND), -math.inf, short)
    return xp.astype(xp.where(xp.isnan(short), math.nan, short), xp.float32)


def power_above(x: Array, xp: Namespace) -> Array:
    r"""A power of two P with :math:`\tfrac38 P \le x \le \tfrac34 P`; 1 for 0.

    As in `rounded`, the carrier is rounded once, and what is left of x is its first bit: P / 2 is one of the two powers
    of two around x.
    """
    carrier = xp.add(xp.multiply(x, 2.0**52), x)
    power = xp.multiply(xp.subtract(carrier, xp.subtract(carrier, x)), 2.0)
    return xp.where(xp.greater(x, 0.0), power, 1.0)


def log2_above(count: int) -> int:
    """The base-2 logarithm of a positive number, rounded up."""
    return max(count - 1, 0).bit_length()


def bits_for(terms: int, other: int | None = None) -> int:
    r"""How many bits b a slice may have, so that a sum of so many products of slices is exact.

    The first slices are at most :math:`\tfrac34 2^b` in magnitude, and later ones :math:`\tfrac12 2^b`; so
    :math:`K (\tfrac34 2^b)^2 \le 2^{53}` holds where :math:`2 b + \lceil \log_2 K \rceil \le 53`. With the bits of the
    other factor given, b is what they leave.
    """
    room = PRECISION - log2_above(terms)
    return room // 2 if other is None else room - other


def slices(x: Array, power: Array, bits: int, count: int, xp: Namespace) -> list[Array]:
    r"""Cut numbers into integers of b bits, :math:`x \approx P \sum_n s_n 2^{-b n}`, n = 1, 2, and so on.

    Parameters
    ----------
    x : Array
        Float64.
    power : Array, which broadcasts
        P: powers of two with :math:`|x| \le \tfrac34 P`.
    bits, count : int
    xp : array namespace

    Every step is exact: products by powers of two, and differences of a number and the integer next to it.
    """
    rest = xp.multiply(x, xp.divide(2.0**bits, power))
    parts = []
    for place in range(count):
        part = xp.round(rest)
        parts.append(part)
        if place + 1 < count:
            rest -= part
            rest *= 2.0**bits
    return parts


def carried(x: Array, xp: Namespace) -> tuple[Array, Array]:
    """Integers of up to 53 bits as (high, low) with x = high * 2**26 + low: 2**26 such parts are added exactly."""
    high = xp.floor(xp.multiply(x, 1 / CARRY))
    return high, xp.subtract(x, xp.multiply(high, CARRY))


def total(parts: tuple[Array, Array], xp: Namespace) -> Array:
    """The integer that sums of carried parts stand for, rounded once: the product is exact."""
    return xp.add(xp.multiply(parts[0], CARRY), parts[1])


def horner(x: Array, coefficients: tuple[float, ...], xp: Namespace) -> Array:
    """A polynomial, its constant coefficient first: each product is settled before a coefficient is added.

    Products that can be read already are past any compiler.
    """
    compiled = not is_concrete(x)
    value = xp.multiply(x, coefficients[-1])
    for place, coefficient in enumerate(reversed(coefficients[:-1])):
        if place:
            value *= x
        if compiled:
            value = settle(value, xp)
        value += coefficient
    return value


def exp2_weight(x: Array, xp: Namespace) -> Array:
    r"""Weights :math:`2^{256 x}` for :math:`x \le 2^{-9}`, off by at most :math:`2^{-38}`; 0 becomes exactly 1.

    .. math:: 2^{256 x} = (p(x))^{256}, \qquad p(x) \approx 2^x

    The squares are products of products, with nothing to contract, and magnify the relative error of p by 256.
    """
    x = xp.maximum(x, number(-0.25, x, xp))  # 2**-64 is no weight
    return _squared(horner(x, (1.0, *WEIGHT), xp))


def _squared(x: Array) -> Array:
    """The eighth square, in the memory of the number where the library writes over arrays."""
    for _ in range(SQUARES):
        x *= x
    return x


# 2**x for -0.6 <= x <= 0, with a relative error below 2**-50: Taylor's polynomial around -0.3.
_CENTRE = -0.3
_POWERS = (
    0.8122523963562356,
    0.5630104584373838,
    0.19512455594581743,
    0.04508334527061822,
    0.0078123484161348915,
    0.001083021455639171,
    0.0001251155447437032,
    1.2389069583331364e-05,
    1.0734310814308888e-06,
    8.267174751324818e-08,
    5.730368870077164e-09,
)


def exp2(x: Array, xp: Namespace) -> Array:
    r"""Powers :math:`2^x` for :math:`x \le 0`, off by less than :math:`2^{-42}` of each, which -150 bounds."""
    x = xp.multiply(xp.maximum(x, number(-150.0, x, xp)), 2.0**-SQUARES)
    return _squared(horner(xp.subtract(x, _CENTRE), _POWERS, xp))


_MIDDLE, _LOG2_MIDDLE = 0.53, -0.9159357352115255
_SERIES = tuple(2 / LN_2 / (2 * n + 1) for n in range(11))


def log2(x: Array, xp: Namespace) -> Array:
    r"""Logarithms to base 2 of positive numbers, off by less than :math:`2^{-45}`.

    .. math:: \log_2 x = e + \log_2 c + \tfrac{2}{\ln 2} \operatorname{artanh} \tfrac{m - c}{m + c}, \qquad x = m 2^e
    """
    power = power_above(x, xp)
    # Of a power of two, so that no library's error survives the rounding:
    exponent = xp.round(xp.multiply(xp.log(power), LOG2_E))
    mantissa = xp.divide(x, power)
    ratio = xp.divide(xp.subtract(mantissa, _MIDDLE), xp.add(mantissa, _MIDDLE))
    series = horner(settle(xp.multiply(ratio, ratio), xp), _SERIES, xp)
    fraction = settle(xp.multiply(ratio, series), xp)
    return xp.add(exponent, xp.add(fraction, _LOG2_MIDDLE))


_TANH = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075, -929569 / 638512875)


def tanh(x: Array, xp: Namespace) -> Array:
    r"""Hyperbolic tangents, with a relative error below :math:`2^{-38}`.

    Near 0 they are Taylor's polynomial; beyond an eighth :math:`(1 - u) / (1 + u)` with :math:`u = e^{-2 |x|}`.
    """
    size = xp.abs(x)
    power = exp2(xp.multiply(size, -2 / LN_2), xp)
    far = xp.divide(xp.subtract(1.0, power), xp.add(1.0, power))
    near = xp.multiply(size, horner(settle(xp.multiply(size, size), xp), _TANH, xp))
    value = xp.where(xp.less(size, 0.125), near, far)
    return xp.where(xp.less(x, 0.0), xp.negative(value), value)


_SINE = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(8))
_COSINE = tuple((-1) ** n / math.factorial(2 * n) for n in range(9))


def sine(x: Array, xp: Namespace) -> Array:
    r"""Sines of :math:`|x| \le 0.79`, with a relative error below :math:`2^{-51}`: Taylor's polynomial."""
    return xp.multiply(x, horner(settle(xp.multiply(x, x), xp), _SINE, xp))


def cosine(x: Array, xp: Namespace) -> Array:
    r"""Cosines of :math:`|x| \le 0.79`, with a relative error below :math:`2^{-51}`: Taylor's polynomial."""
    return horner(settle(xp.multiply(x, x), xp), _COSINE, xp)


def peak(x: Array, axis: Any, xp: Namespace) -> Array:
    """The power of two above all magnitudes along an axis, which stays: nan if one is not finite, 1 of none."""
    if 0 in x.shape:
        return xp.ones_like(xp.sum(x, axis=axis, keepdims=True))
    size = xp.abs(x)
    bounded = xp.less(size, math.inf)  # said outright: not every maximum keeps nan
    power = power_above(xp.max(xp.where(bounded, size, 0.0), axis=axis, keepdims=True), xp)
    return xp.where(xp.all(bounded, axis=axis, keepdims=True), power, math.nan)


def dots(x: Array, y: Array, xp: Namespace) -> Array:
    """Products of vectors (..., C), row by row, as float64: (..., 1)."""
    bits = bits_for(x.shape[-1])
    powers = [peak(each, -1, xp) for each in (x, y)]
    (x1, x2), (y1, y2) = (slices(each, power, bits, 2, xp) for each, power in zip((x, y), powers, strict=True))
    high = xp.sum(xp.multiply(x1, y1), axis=-1, keepdims=True)
    cross = (xp.sum(xp.multiply(*each), axis=-1, keepdims=True) for each in ((x1, y2), (x2, y1)))
    low = xp.multiply(xp.add(*cross), 2.0**-bits)
    return xp.multiply(xp.add(high, low), xp.multiply(xp.multiply(*powers), 2.0 ** (-2 * bits)))
