r"""Sums and roundings that have the same bits on every library, compiler and device with IEEE float64.

Results differ between libraries for four reasons. One rule meets each of them:

* *Sums in another order round differently.* All sums of products are sums of integers that float64 holds exactly
  (`slices`). No order, blocking, thread count or fused multiplication can change them.
* *Compilers contract* ``a * b + c`` *into one rounding.* A rounded product passes through
  `uncontracted`, or another maximum, minimum, rounding or choice, before anything is added to it. A product by a power
  of two is exact.
* *Elementary functions differ in the last places.* `exp2`, `log2`, `tanh`, `sine` and `cosine` are
  polynomials, whose products and sums float64 rounds in one way only. Division and square root are correctly rounded
  everywhere. Compilers rewrite divisions by a constant, another quotient, a root, or a broadcast number, so there are
  none of these (`divide_rows`).
* *Some libraries flush subnormal numbers to zero.* All intermediate numbers are normal. Subnormal float32 counts as 0
  coming in (`to_float64`) and becomes 0 going out (`round_to_float32`).

References
----------
K. Ozaki et al., "Error-free transformations of matrix multiplication by using fast routines of matrix multiplication
and its applications", 2012. G. W. Veltkamp's splitting: S. Boldo, "Pitfalls of a full floating-point proof", 2006.
"""

from __future__ import annotations

import math
from typing import Any

from .._arrays import Array, DType, Namespace, cast_to, dtype_name, scalar_like, upcast
from .._backend import runs_at_once

PRECISION = 53  # bits of float64: integers up to 2**53 are added exactly
LONGEST = 4096  # terms that one matrix product adds up; longer sums are added as two parts each
CARRY = 2.0**26
SMALLEST, FLOAT32_OVERFLOW = 2.0**-126, 2.0**128  # the least normal float32, and the first number above all
# Bits, the least normal number, and one up to which sums of so many bits are float32.
HALF_RANGES = {"bfloat16": (8, SMALLEST, 2.0**100), "float16": (11, 2.0**-14, 65504.0)}
ROUNDED_TO_SMALLEST = SMALLEST - 2.0**-151  # rounding to 24 bits makes this and what is above at least the former
FLOAT64_MAX = 1.7976931348623157e308
LN_2, LOG2_E = 0.6931471805599453, 1.4426950408889634  # literals: C libraries may round differently


def uncontracted(x: Array, xp: Namespace) -> Array:
    """The same numbers; no compiler can contract a product that ends here with a sum that follows.

    A maximum of XLA loses nan where arrays are large.
    """
    least = scalar_like(-FLOAT64_MAX, x, xp)
    return xp.maximum(x, least) if runs_at_once(x) else xp.where(xp.less(x, least), least, x)


def to_float64(x: Array, xp: Namespace) -> Array:
    """Numbers of at most 32 bits as float64: exact, except that subnormal float32 becomes 0."""
    if runs_at_once(x) and 0 not in x.shape and bool(xp.greater_equal(xp.min(xp.abs(x)), SMALLEST)):  # none is nan
        return xp.astype(x, xp.float64)
    x = xp.astype(x, xp.float64)  # before the choice: after it, XLA compiles some programs of TensorFlow without end
    return xp.where(xp.less(xp.abs(x), SMALLEST), 0.0, x)


def divide_rows(x: Array, divisor: Array, xp: Namespace) -> Array:
    """Numbers over a divisor that broadcasts: by its reciprocal, as XLA rewrites such a division that way anyway."""
    return xp.multiply(x, uncontracted(xp.divide(1.0, divisor), xp))


def round_to_float32(x: Array, xp: Namespace) -> Array:
    r"""Round float64 once to the nearest float32; below :math:`2^{-126}` to 0, above the largest to infinity.

    A conversion rounds so, but a compiler may leave it out. There the sum :math:`c = 2^{29} x + x` has one rounding, as
    its product is exact. So :math:`c - (c - x)` is x to 24 bits: this is Veltkamp's splitting.
    """
    if 0 not in x.shape and runs_at_once(x):
        size = xp.abs(x)
        if bool(xp.less(xp.max(size), FLOAT32_OVERFLOW / 2)):  # nan is not, either
            short = xp.astype(x, xp.float32)
            is_normal = bool(xp.greater_equal(xp.min(size), SMALLEST))
            return short if is_normal else xp.where(xp.less(size, ROUNDED_TO_SMALLEST), 0.0, short)
    x = xp.minimum(
        xp.maximum(x, scalar_like(-2 * FLOAT32_OVERFLOW, x, xp)), scalar_like(2 * FLOAT32_OVERFLOW, x, xp)
    )  # the bounds also end a product, as in `uncontracted`
    short = _shortened(x, PRECISION - 24, xp)
    short = xp.where(xp.less(xp.abs(short), SMALLEST), 0.0, short)  # also -0, whose sign depends on the order of a sum
    short = xp.where(xp.greater_equal(short, FLOAT32_OVERFLOW), math.inf, short)
    short = xp.where(xp.less_equal(short, -FLOAT32_OVERFLOW), -math.inf, short)
    return xp.astype(xp.where(xp.isnan(short), math.nan, short), xp.float32)


def round_to_half(x: Array, /, *, dtype: DType, xp: Namespace) -> Array:
    """Round float32 to the numbers that a type of 16 bits holds, and return float32: a cast to that type is then exact.

    A compiler may leave out a pair of conversions. So normal numbers are rounded as in `round_to_float32`, to the same
    bits; their gradient passes as it is, in float32.
    """
    bits, smallest, largest = HALF_RANGES[dtype_name(dtype)]
    size = xp.abs(x)
    is_normal = xp.logical_and(xp.greater_equal(size, smallest), xp.less(size, largest))
    return xp.where(is_normal, _shortened(x, 24 - bits, xp), upcast(cast_to(x, dtype, xp=xp), xp=xp))


def _shortened(x: Array, dropped: int, xp: Namespace) -> Array:
    """Numbers without their last bits, so many of them: G. W. Veltkamp's splitting."""
    short = xp.multiply(x, 2.0**dropped)
    short += x
    short -= xp.subtract(short, x)
    return short


def as_three_float32(x: Array, xp: Namespace) -> list[Array]:
    """Float64 numbers as sums of three float32 numbers."""
    parts: list[Array] = []
    for _ in range(3):
        parts.append(round_to_float32(x, xp))
        x = xp.subtract(x, xp.astype(parts[-1], xp.float64))
    return parts


def power_above(x: Array, xp: Namespace) -> Array:
    r"""A power of two P with :math:`\tfrac38 P \le x \le \tfrac34 P`; 1 for 0.

    As in `round_to_float32`, the carrier is rounded once, here to the first bit of x: P / 2 is one of the two powers of
    two around x.
    """
    carrier = xp.add(xp.multiply(x, 2.0**52), x)
    power = xp.multiply(xp.subtract(carrier, xp.subtract(carrier, x)), 2.0)
    return xp.where(xp.greater(x, 0.0), power, 1.0)


def ceil_log2(count: int) -> int:
    """The base-2 logarithm of a positive number, rounded up."""
    return max(count - 1, 0).bit_length()


def slice_bits(terms: int) -> int:
    r"""How many bits b a slice may have for an exact sum of so many products of slices.

    The first slices are at most :math:`\tfrac34 2^b` in magnitude, and later ones :math:`\tfrac12 2^b`; so
    :math:`K (\tfrac34 2^b)^2 \le 2^{53}` holds where :math:`2 b + \lceil \log_2 K \rceil \le 53`.
    """
    return (PRECISION - ceil_log2(terms)) // 2


def slices(x: Array, power: Array, *, bits: int, count: int, may_end: bool = False, xp: Namespace) -> list[Array]:
    r"""Cut float64 numbers into integers of b bits, :math:`x \approx P \sum_n s_n 2^{-b n}`, n = 1, 2, and so on.

    P holds powers of two with :math:`|x| \le \tfrac34 P`. Each step is exact: a product by a power of two, or the
    difference of a number and the nearest integer. They may end where a library sees at once that nothing is left.
    """
    rest = xp.multiply(x, xp.divide(2.0**bits, power))
    parts: list[Array] = []
    while len(parts) < count:
        if parts:
            rest -= parts[-1]
            if may_end and runs_at_once(rest) and not bool(xp.any(rest)):
                break
            rest *= 2.0**bits
        parts.append(xp.round(rest))
    return parts


def two_sum(x: Array, y: Array, xp: Namespace) -> tuple[Array, Array]:
    """A sum, and what its rounding left out: together they are exact (D. Knuth's TwoSum)."""
    total = xp.add(x, y)
    of_y = xp.subtract(total, x)
    of_x = xp.subtract(total, of_y)
    return total, xp.add(xp.subtract(x, of_x), xp.subtract(y, of_y))


def split_carry(x: Array, xp: Namespace) -> tuple[Array, Array]:
    """Integers of up to 53 bits as (high, low), x = high * 2**26 + low: sums of up to 2**26 such parts are exact."""
    high = xp.floor(xp.multiply(x, 1 / CARRY))
    return high, xp.subtract(x, xp.multiply(high, CARRY))


def join_carry(parts: tuple[Array, Array], xp: Namespace) -> Array:
    """The integer high * 2**26 + low of two sums of parts, rounded once: the product is exact."""
    return xp.add(xp.multiply(parts[0], CARRY), parts[1])


def power_above_max(x: Array, axis: Any, xp: Namespace) -> Array:
    """The power of two above all magnitudes along an axis of length 1 then: nan if one is not finite, 1 of none."""
    largest = largest_magnitude(x, axis, xp)
    bounded = xp.less(largest, math.inf)
    return xp.where(bounded, power_above(xp.where(bounded, largest, 0.0), xp), math.nan)


def largest_magnitude(x: Array, axis: Any, xp: Namespace) -> Array:
    """The largest magnitude along an axis of length 1 then: infinite if one is not finite, 0 of none."""
    size = xp.abs(x)
    if 0 in x.shape:
        return xp.sum(size, axis=axis, keepdims=True)
    if not runs_at_once(x):  # a maximum that may lose nan
        size = xp.where(xp.less(size, math.inf), size, math.inf)
    largest = xp.max(size, axis=axis, keepdims=True)
    return xp.where(xp.less(largest, math.inf), largest, math.inf)
