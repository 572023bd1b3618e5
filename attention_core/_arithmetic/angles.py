r"""The angles of rotary positions, counted in turns; whole turns are dropped exactly.

A frequency is a number of turns in fixed point, cut into words. Products of words and positions are exact, so dropping
their whole turns loses nothing, however large the position.
"""

from __future__ import annotations

import decimal
import functools
import math
import operator
from typing import Any, NamedTuple

from .._arrays import Array, DType, Namespace, dtype_name, index_dtype, one_program, shape
from .._backend import array_of, can_be_read, is_compiling, is_concrete, numbers_of, register
from .._checks import remember
from .._keywords import untraced
from .elementary import cosine, sine
from .exact import uncontracted

Words = tuple[list[Any], list[Any], list[Any]]

_TURN = 0xA2F9836E4E441529FC2757D1F534DDC0DB629599  # 2**162 / (2 pi), rounded down
_BITS = 400  # after the point: even a frequency of 2**-300 turns keeps 53 significant bits
_MOST_NUMBERS = 2**10  # that are kept of a table
_kept_tables: dict[Any, list[Any]] = {}
_DECIMALS = decimal.Context(prec=60, rounding=decimal.ROUND_HALF_EVEN, Emin=-9999, Emax=9999, traps=[])


class Rotation(NamedTuple):
    """What rotates pairs of channels: the base and the divisors of frequencies, and which channels are pairs."""

    base: float
    width: int
    interleaved: bool
    divisors: tuple[float, ...] | None = None


register("Rotation", Rotation)


def split_pairs(x: Array, *, width: int, interleaved: bool, xp: Namespace) -> tuple[Array, Array]:
    """The channels to rotate: the first of each pair, and the second."""
    if not interleaved:
        return x[..., : width // 2], x[..., width // 2 : width]
    pairs = xp.reshape(x[..., :width], (*shape(x, xp=xp)[:-1], width // 2, 2))
    return pairs[..., 0], pairs[..., 1]


def join_pairs(pair: tuple[Array, Array], x: Array, *, width: int, interleaved: bool, xp: Namespace) -> Array:
    """The inverse of `split_pairs`; channels of ``x`` after the first ``width`` follow as they are."""
    parts = list(pair)
    if interleaved:
        parts = [xp.reshape(xp.stack(parts, axis=-1), (*shape(x, xp=xp)[:-1], width))]
    if width < x.shape[-1]:
        parts.append(x[..., width:])
    return xp.concat(parts, axis=-1)


def tables(plan: Rotation, positions: Array, x: Array, xp: Namespace) -> tuple[Array, Array]:
    """Cosine and sine of all angles, (..., 1, L, W/2), in the dtype of ``x``, for positions (..., 1, L, 1).

    Those of few positions are kept as numbers: in a step of decoding, all layers ask for the same.
    """
    settings = plan.base, plan.width, plan.divisors
    places = _read(positions, plan.width, x)
    key = (xp.__name__, x.dtype, str(places), settings)
    known = None if places is None else _kept_tables.get(key)
    if known is not None:
        table = array_of(known, x.dtype, x, xp)
    else:  # one array, which Inductor computes once: it would repeat the angles in each layer
        table = xp.stack(_computed_tables(positions, x, settings, xp))
        if places is not None and (numbers := _read(table, 1, x)) is not None:
            remember(_kept_tables, key, numbers, most=64)
    return table[0, ...], table[1, ...]


def _read(array: Array, width: int, like: Array) -> list[Any] | None:
    """The numbers of an array as lists; ``None`` where they cannot be read without waiting, or tables are large."""
    if not (is_concrete(like) and can_be_read(array)) or not 0 < math.prod(array.shape) * width <= _MOST_NUMBERS:
        return None
    try:
        return numbers_of(array)
    except RuntimeError:  # of tensors in transforms of torch.func, which have no memory of their own
        return None


def _computed_tables(positions: Array, x: Array, settings: Any, xp: Namespace) -> tuple[Array, Array]:
    is_float64 = dtype_name(x.dtype) == "float64"
    words = _words(
        "floats" if is_float64 else "integers", *(_without_symbols(*settings) if is_compiling(x) else settings)
    )
    if is_float64:
        quadrant, angle = _angle_by_floats(xp.astype(positions, x.dtype), words, xp)
    else:
        numbers = _in_one_array(words, index_dtype(positions, xp=xp), x, xp)
        quadrant, remainder = one_program(_quarter_turns, xp)(positions, numbers, xp=xp)
        angle = xp.multiply(xp.astype(remainder, x.dtype), 2 * math.pi / 2**32)
    cos, sin = one_program(_rotate_by_quadrant, xp)(xp.cos(angle), xp.sin(angle), quadrant, xp=xp)
    return cos, sin


def exact_tables(plan: Rotation, positions: Array, *, xp: Namespace) -> tuple[Array, Array]:
    """The same for positions in float64, with the same bits everywhere."""
    quadrant, angle = _angle_by_floats(positions, _words("floats", plan.base, plan.width, plan.divisors), xp)
    return _rotate_by_quadrant(cosine(angle, xp), sine(angle, xp), quadrant, xp=xp)


def _rotate_by_quadrant(cos: Array, sin: Array, quadrant: Array, *, xp: Namespace) -> tuple[Array, Array]:
    """Cosine and sine of an angle plus so many quarter turns."""
    odd = xp.not_equal(xp.bitwise_and(quadrant, 1), 0)
    cos, sin = xp.where(odd, sin, cos), xp.where(odd, cos, sin)
    return (
        xp.where(xp.equal(xp.bitwise_and(xp.add(quadrant, 1), 2), 0), cos, xp.negative(cos)),
        xp.where(xp.equal(xp.bitwise_and(quadrant, 2), 0), sin, xp.negative(sin)),
    )


def _quarter_turns(position: Array, words: Array, *, xp: Namespace) -> tuple[Array, Array]:
    """Positions times frequencies: quarter turns as int32, modulo four, and the remainder in units of 2**-32 turns.

    A position has two halves of 16 bits. Integers of 64 bits hold all products; those of 32 bits wrap around, which
    counts modulo one turn.
    """
    high, middle, low = _parts(words)
    position = xp.astype(xp.astype(position, xp.int32), words.dtype)
    upper, lower = xp.bitwise_right_shift(position, 16), xp.bitwise_and(position, 0xFFFF)
    count = xp.multiply(position, high)  # in units of 2**-32 turns
    count = xp.add(count, xp.multiply(xp.multiply(upper, middle), 2))
    count = xp.add(count, xp.bitwise_right_shift(xp.multiply(lower, middle), 15))
    count = xp.add(count, xp.bitwise_right_shift(xp.multiply(upper, low), 14))
    count = xp.astype(xp.add(count, 2**29), xp.int32)  # plus an eighth of a turn: to the nearest quarter
    remainder = xp.subtract(xp.bitwise_and(count, 2**30 - 1), 2**29)
    return xp.bitwise_right_shift(count, 30), remainder


def _angle_by_floats(position: Array, words: Words, xp: Namespace) -> tuple[Array, Array]:
    """The same in float64, and the angle within pi / 4: a position of 31 bits times a word of 22 is exact."""
    high, middle, low = _parts(_in_one_array(words, position.dtype, position, xp))
    turn = xp.add(_fraction(xp.multiply(position, high), xp), _fraction(xp.multiply(position, middle), xp))
    quarters = xp.round(xp.multiply(turn, 4.0))
    remainder = xp.subtract(turn, xp.multiply(quarters, 0.25))
    remainder = xp.add(remainder, uncontracted(xp.multiply(position, low), xp))
    return xp.astype(quarters, xp.int32), xp.multiply(remainder, 2 * math.pi)


def _in_one_array(words: Words, dtype: DType, like: Array, xp: Namespace) -> Array:
    """Three lists of as many numbers, one after the other: three arrays take three times as long to make."""
    return array_of([number for word in words for number in word], dtype, like, xp)


def _parts(words: Array) -> list[Array]:
    count = words.shape[0] // 3
    return [words[first : first + count] for first in (0, count, 2 * count)]


def _without_symbols(
    base: float, width: int, divisors: tuple[float, ...] | None
) -> tuple[float, int, tuple[float, ...] | None]:
    """The settings as numbers, for which a compiler of open lengths has symbols."""
    floats = [float.fromhex(float(each).hex()) for each in (base, *(divisors or ()))]
    return floats[0], operator.index(width), None if divisors is None else tuple(floats[1:])


@untraced
def _words(kind: str, base: float, width: int, divisors: tuple[float, ...] | None) -> Words:
    """All frequencies, in turns and in fixed point, as a word of high, of middle and of low bits for each."""
    return _kept_words(kind, base, width, divisors)


@functools.lru_cache(maxsize=64)
def _kept_words(kind: str, base: float, width: int, divisors: tuple[float, ...] | None) -> Words:
    turns = _turns(base, width, divisors)
    if kind == "floats":  # two words of 22 bits, and the rest
        return (
            [math.ldexp(turn >> _BITS - 22, -22) for turn in turns],
            [math.ldexp(turn >> _BITS - 44 & 0x3FFFFF, -44) for turn in turns],
            [math.ldexp(turn & (1 << _BITS - 44) - 1, -_BITS) for turn in turns],
        )
    turns = [turn >> _BITS - 62 for turn in turns]  # a word of 32 bits, signed, and two of 15
    return (
        [(turn >> 30 ^ 2**31) - 2**31 for turn in turns],
        [turn >> 15 & 0x7FFF for turn in turns],
        [turn & 0x7FFF for turn in turns],
    )


def _turns(base: float, width: int, divisors: tuple[float, ...] | None) -> list[int]:
    """Frequencies in turns modulo one, in fixed point, rounded down.

    They come from decimals, whose logarithms and exponentials are correctly rounded, unlike those of C.
    """
    log = _DECIMALS.ln(decimal.Decimal(base))
    turns = []
    for i, divisor in enumerate(divisors or (1.0,) * (width // 2)):
        power = _DECIMALS.exp(_DECIMALS.divide(_DECIMALS.multiply(log, -2 * i), width))
        frequency = _DECIMALS.divide(power, decimal.Decimal(float(divisor)))
        turns.append(int(_DECIMALS.multiply(frequency, _TURN << _BITS - 162)) & (1 << _BITS) - 1)
    return turns


def _fraction(number: Array, xp: Namespace) -> Array:
    return xp.subtract(number, xp.round(number))
