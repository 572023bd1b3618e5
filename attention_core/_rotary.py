"""Rotary position embedding, with angles that stay exact at large positions."""

from __future__ import annotations

import math

from attention_core._checks import (
    check_broadcastable,
    check_device,
    check_flag,
    check_floating,
    check_integer,
    check_number,
    check_positive,
    check_rank,
    shape_text,
    sizes,
)
from attention_core._namespace import array_namespace, beside, dtype_name, index_dtype, narrow, shape, widen
from attention_core._typing import Array, Namespace

__all__ = ["rotary_embedding"]

_TURN = 0xA2F9836E4E441529FC2757D1F534DDC0DB629599  # 2**162 / (2 pi), rounded down


def rotary_embedding(
    x: Array,
    positions: Array,
    /,
    *,
    base: float = 10000.0,
    interleaved: bool = False,
    width: int | None = None,
    xp: Namespace | None = None,
) -> Array:
    r"""Rotate pairs of channels by angles that grow with the position, so that scores depend on distances.

    .. math::

        (y_a, y_b) = (x_a \cos\phi - x_b \sin\phi,\; x_b \cos\phi + x_a \sin\phi), \qquad
        \phi = p\, \theta^{-2i/W}, \qquad i = 0, …, W/2 - 1

    Pair i is :math:`(a, b) = (i, i + W/2)`, as in GPT-NeoX and Llama; or, interleaved, :math:`(2i, 2i + 1)`, as in
    RoFormer and GPT-J.

    Parameters
    ----------
    x : Array, shape (..., H, L, D)
        Query or key heads. Types of 16 bits are computed in float32 and rounded once.
    positions : Array of int, broadcastable to (..., L)
        p, below :math:`2^{31}` in magnitude; the same for all heads.
    base : float
        :math:`\theta`, at least 1.
    interleaved : bool
        Whether the channels of a pair lie side by side.
    width : int, optional
        W, even: the first W channels are rotated and the others kept; by default all.
    xp : array namespace, optional

    Returns
    -------
    Array, shape (..., H, L, D)
        Of the dtype of ``x``.

    Raises
    ------
    TypeError, ValueError
        When dtypes or shapes do not fit, or base or width is none.

    Notes
    -----
    Turns are counted in fixed point, modulo one, so that a large position costs no accuracy. Over all positions that
    fit, the error measured is at most 2.1 units in the last place of the length of a pair: in float32 of the formula,
    in float64 of the formula with its frequencies rounded to float64. Where the angle is multiplied in float32, as
    it commonly is, the cosine is off by 3e-3 at position 2**17, and by 2e-2 at position 2**20.

    References
    ----------
    J. Su et al., "RoFormer", 2021. S. Black et al., "GPT-NeoX-20B", 2022, for ``width``.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> turned = rotary_embedding(xp.asarray([[[1.0, 0.0]]]), xp.asarray([1]))  # by one radian
    >>> [round(float(turned[0, 0, channel]), 4) for channel in (0, 1)]
    [0.5403, 0.8415]
    """
    xp = array_namespace(x, positions) if xp is None else xp
    width = _checked_width(x, positions, base, interleaved, width)
    dtype = x.dtype
    x = widen(x, xp=xp)
    cos, sin = _tables(positions, float(base), width, x, xp)
    first, second = _pairs(x, width, interleaved, xp)
    turned = (
        xp.subtract(xp.multiply(first, cos), xp.multiply(second, sin)),
        xp.add(xp.multiply(second, cos), xp.multiply(first, sin)),
    )
    rotated = _joined(turned, x, width, interleaved, xp)
    return narrow(rotated, dtype, xp=xp)


def _checked_width(x: Array, positions: Array, base: float, interleaved: bool, width: int | None) -> int:
    """Raise unless the arguments fit; the number of channels to rotate."""
    check_rank("x", x, 3, "(..., H, L, D)")
    check_floating("x", x)
    check_rank("positions", positions, 0, "(..., L)")
    check_integer("positions", positions)
    *leading, _, length, channels = sizes(x)
    check_broadcastable("positions", positions, (*leading, length))
    check_device("positions", positions, "x", x)
    check_flag("interleaved", interleaved)
    if hasattr(base, "dtype"):
        raise TypeError(f"expected base as a Python number; got {type(base).__name__}")
    check_number("base", base)
    if base < 1:
        raise ValueError(f"expected base >= 1; got {base}")
    if channels is None:
        raise ValueError(f"expected x with a known number of channels; got {shape_text(x)}")
    if width is not None:
        check_positive("width", width)
    width = channels if width is None else width
    if width % 2 or width > channels:
        raise ValueError(f"expected an even width of at most {channels} channels; got {width}")
    return width


def _pairs(x: Array, width: int, interleaved: bool, xp: Namespace) -> tuple[Array, Array]:
    if not interleaved:
        return x[..., : width // 2], x[..., width // 2 : width]
    pairs = xp.reshape(x[..., :width], (*shape(x, xp=xp)[:-1], width // 2, 2))
    return pairs[..., 0], pairs[..., 1]


def _joined(pair: tuple[Array, Array], x: Array, width: int, interleaved: bool, xp: Namespace) -> Array:
    """The inverse of `_pairs`, with the channels that are not rotated."""
    parts = list(pair)
    if interleaved:
        parts = [xp.reshape(xp.stack(parts, axis=-1), (*shape(x, xp=xp)[:-1], width))]
    if width < shape(x, xp=xp)[-1]:
        parts.append(x[..., width:])
    return xp.concat(parts, axis=-1)


def _tables(positions: Array, base: float, width: int, x: Array, xp: Namespace) -> tuple[Array, Array]:
    """Cosine and sine of all angles, (..., 1, L, W/2), in the dtype of ``x``."""
    place = xp.reshape(positions, (1,)) if not len(positions.shape) else positions
    place = xp.expand_dims(xp.expand_dims(place, axis=-2), axis=-1)
    frequencies = [base ** (-2 * i / width) for i in range(width // 2)]
    turned = _turned_in_floating_point if dtype_name(x.dtype) == "float64" else _turned_in_integers
    quadrant, angle = turned(place, frequencies, x, xp)
    cos, sin = xp.cos(angle), xp.sin(angle)
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
    high, middle, low = (xp.asarray(word, dtype=wide, **beside(x)) for word in words)
    place = xp.astype(xp.astype(place, xp.int32), wide)
    upper, lower = xp.bitwise_right_shift(place, 16), xp.bitwise_and(place, 0xFFFF)
    count = xp.multiply(place, high)  # in units of 2**-32 turns
    count = xp.add(count, xp.multiply(xp.multiply(upper, middle), 2))
    count = xp.add(count, xp.bitwise_right_shift(xp.multiply(lower, middle), 15))
    count = xp.add(count, xp.bitwise_right_shift(xp.multiply(upper, low), 14))
    count = xp.astype(xp.add(count, 2**29), xp.int32)  # from an eighth of a turn before a quarter
    left = xp.subtract(xp.bitwise_and(count, 2**30 - 1), 2**29)
    return xp.bitwise_right_shift(count, 30), xp.multiply(xp.astype(left, x.dtype), 2 * math.pi / 2**32)


def _turned_in_floating_point(place: Array, frequencies: list[float], x: Array, xp: Namespace) -> tuple[Array, Array]:
    """The same in float64: a position of 31 bits times a word of 22 bits is exact."""
    turns = [_turns(frequency, 120) for frequency in frequencies]
    words = (
        [math.ldexp(turn >> 98, -22) for turn in turns],
        [math.ldexp(turn >> 76 & 0x3FFFFF, -44) for turn in turns],
        [math.ldexp(turn & 2**76 - 1, -120) for turn in turns],
    )
    high, middle, low = (xp.asarray(word, dtype=x.dtype, **beside(x)) for word in words)
    place = xp.astype(place, x.dtype)
    turn = xp.add(_fraction(xp.multiply(place, high), xp), _fraction(xp.multiply(place, middle), xp))
    quarters = xp.round(xp.multiply(turn, 4.0))
    turn = xp.add(xp.subtract(turn, xp.multiply(quarters, 0.25)), xp.multiply(place, low))
    return xp.astype(quarters, xp.int32), xp.multiply(turn, 2 * math.pi)


def _turns(frequency: float, bits: int) -> int:
    """A frequency in turns modulo one, with so many bits after the point, rounded down."""
    mantissa, exponent = math.frexp(frequency)
    turns = int(mantissa * 2**53) * _TURN >> 162 + 53 - exponent - bits
    return turns & (1 << bits) - 1


def _fraction(number: Array, xp: Namespace) -> Array:
    return xp.subtract(number, xp.round(number))


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
