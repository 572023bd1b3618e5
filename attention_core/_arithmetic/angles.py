r"""The angles of rotary positions, counted in turns, of which whole ones are left out exactly.

A frequency is a number of turns in fixed point, cut into words. Products of words and positions are exact, so that
what is dropped of them is whole turns and nothing else, however large the position.
"""

from __future__ import annotations

import decimal
import functools
import math

from attention_core._arithmetic.elementary import cosine, sine
from attention_core._arithmetic.exact import uncontracted
from attention_core._arrays import Array, Namespace, dtype_name, index_dtype, on_device_of, shape

_TURN = 0xA2F9836E4E441529FC2757D1F534DDC0DB629599  # 2**162 / (2 pi), rounded down
_EXACT_BITS = 400  # after the point, so that even 2**-300 turns have 53 that count
_DECIMALS = decimal.Context(prec=60, rounding=decimal.ROUND_HALF_EVEN, Emin=-9999, Emax=9999, traps=[])


def split_pairs(x: Array, width: int, interleaved: bool, xp: Namespace) -> tuple[Array, Array]:
    """The channels to rotate: the first of every pair, and the second."""
    if not interleaved:
        return x[..., : width // 2], x[..., width // 2 : width]
    pairs = xp.reshape(x[..., :width], (*shape(x, xp=xp)[:-1], width // 2, 2))
    return pairs[..., 0], pairs[..., 1]


def join_pairs(pair: tuple[Array, Array], x: Array, width: int, interleaved: bool, xp: Namespace) -> Array:
    """The inverse of `pairs`, with the channels that are not rotated."""
    parts = list(pair)
    if interleaved:
        parts = [xp.reshape(xp.stack(parts, axis=-1), (*shape(x, xp=xp)[:-1], width))]
    if width < shape(x, xp=xp)[-1]:
        parts.append(x[..., width:])
    return xp.concat(parts, axis=-1)


def tables(places: Array, base: float, width: int, x: Array, xp: Namespace) -> tuple[Array, Array]:
    """Cosine and sine of all angles, (..., 1, L, W/2), in the dtype of ``x``, for positions (..., 1, L, 1)."""
    frequencies = [base ** (-2 * i / width) for i in range(width // 2)]
    if dtype_name(x.dtype) == "float64":
        turns = [_turns(frequency, 120) for frequency in frequencies]
        quadrant, angle = _turned_in_floating_point(xp.astype(places, x.dtype), turns, 120, xp)
    else:
        quadrant, angle = _turned_in_integers(places, frequencies, x, xp)
    return _in_quadrant(xp.cos(angle), xp.sin(angle), quadrant, xp)


def exact_tables(places: Array, base: float, width: int, xp: Namespace) -> tuple[Array, Array]:
    """The same with the same bits everywhere, for positions in float64, and frequencies that are not rounded to it."""
    quadrant, angle = _turned_in_floating_point(places, _exact_turns(base, width), _EXACT_BITS, xp)
    return _in_quadrant(cosine(angle, xp), sine(angle, xp), quadrant, xp)


def _in_quadrant(cos: Array, sin: Array, quadrant: Array, xp: Namespace) -> tuple[Array, Array]:
    """Cosine and sine after so many quarter turns."""
    odd = xp.not_equal(xp.bitwise_and(quadrant, 1), 0)
    cos, sin = xp.where(odd, sin, cos), xp.where(odd, cos, sin)
    return (
        xp.where(xp.equal(xp.bitwise_and(xp.add(quadrant, 1), 2), 0), cos, xp.negative(cos)),
        xp.where(xp.equal(xp.bitwise_and(quadrant, 2), 0), sin, xp.negative(sin)),
    )


def _turned_in_integers(place: Array, frequencies: list[float], x: Array, xp: Namespace) -> tuple[Array, Array]:
    """Positions times frequencies: quarter turns as int32, modulo four, and the angle left, within pi / 4.

    A frequency, in turns, has 62 bits after the point: a word of 32 and two of 15. A position has two halves of 16.
    Integers of 64 bits hold all products; those of 32 wrap around, which is to count modulo a turn.
    """
    wide = index_dtype(place, xp=xp)
    turns = [_turns(frequency, 62) for frequency in frequencies]
    words = (
        [_signed(turn >> 30) for turn in turns],
        [turn >> 15 & 0x7FFF for turn in turns],
        [turn & 0x7FFF for turn in turns],
    )
    high, middle, low = (xp.asarray(word, dtype=wide, **on_device_of(x)) for word in words)
    place = xp.astype(xp.astype(place, xp.int32), wide)
    upper, lower = xp.bitwise_right_shift(place, 16), xp.bitwise_and(place, 0xFFFF)
    count = xp.multiply(place, high)  # in units of 2**-32 turns
    count = xp.add(count, xp.multiply(xp.multiply(upper, middle), 2))
    count = xp.add(count, xp.bitwise_right_shift(xp.multiply(lower, middle), 15))
    count = xp.add(count, xp.bitwise_right_shift(xp.multiply(upper, low), 14))
    count = xp.astype(xp.add(count, 2**29), xp.int32)  # from an eighth of a turn before a quarter
    left = xp.subtract(xp.bitwise_and(count, 2**30 - 1), 2**29)
    return xp.bitwise_right_shift(count, 30), xp.multiply(xp.astype(left, x.dtype), 2 * math.pi / 2**32)


def _turned_in_floating_point(place: Array, turns: list[int], bits: int, xp: Namespace) -> tuple[Array, Array]:
    """The same in float64, of frequencies with so many bits: a position of 31 bits times a word of 22 bits is exact."""
    words = (
        [math.ldexp(turn >> bits - 22, -22) for turn in turns],
        [math.ldexp(turn >> bits - 44 & 0x3FFFFF, -44) for turn in turns],
        [math.ldexp(turn & (1 << bits - 44) - 1, -bits) for turn in turns],
    )
    high, middle, low = (xp.asarray(word, dtype=place.dtype, **on_device_of(place)) for word in words)
    turn = xp.add(_fraction(xp.multiply(place, high), xp), _fraction(xp.multiply(place, middle), xp))
    quarters = xp.round(xp.multiply(turn, 4.0))
    left = xp.subtract(turn, xp.multiply(quarters, 0.25))
    left = xp.add(left, uncontracted(xp.multiply(place, low), xp))
    return xp.astype(quarters, xp.int32), xp.multiply(left, 2 * math.pi)


@functools.cache
def _exact_turns(base: float, width: int) -> list[int]:
    """Frequencies in turns, of decimals, whose logarithms and exponentials are rounded correctly, as C's may not be."""
    log = _DECIMALS.ln(decimal.Decimal(base))
    powers = (_DECIMALS.exp(_DECIMALS.divide(_DECIMALS.multiply(log, -2 * i), width)) for i in range(width // 2))
    return [int(_DECIMALS.multiply(power, _TURN << _EXACT_BITS - 162)) for power in powers]


def _turns(frequency: float, bits: int) -> int:
    """A frequency in turns modulo one, with so many bits after the point, rounded down."""
    mantissa, exponent = math.frexp(frequency)
    turns = int(mantissa * 2**53) * _TURN >> 162 + 53 - exponent - bits
    return turns & (1 << bits) - 1


def _fraction(number: Array, xp: Namespace) -> Array:
    return xp.subtract(number, xp.round(number))


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
