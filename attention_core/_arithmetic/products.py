"""Exact sums of products in float64, which no order of addition changes."""

from __future__ import annotations

from typing import Any

from attention_core._arithmetic.exact import LONGEST, join_carry, power_above_max, slice_bits, slices, split_carry
from attention_core._arrays import Array, Namespace, on_device_of, shape


def row_dots(x: Array, y: Array, xp: Namespace) -> Array:
    """Products of vectors (..., C), row by row, as float64: (..., 1)."""
    bits = slice_bits(x.shape[-1])
    powers = [power_above_max(each, -1, xp) for each in (x, y)]
    (x1, x2), (y1, y2) = (slices(each, power, bits, 2, xp) for each, power in zip((x, y), powers, strict=True))
    high = xp.sum(xp.multiply(x1, y1), axis=-1, keepdims=True)
    cross = (xp.sum(xp.multiply(*each), axis=-1, keepdims=True) for each in ((x1, y2), (x2, y1)))
    low = xp.multiply(xp.add(*cross), 2.0**-bits)
    return xp.multiply(xp.add(high, low), xp.multiply(xp.multiply(*powers), 2.0 ** (-2 * bits)))


SUM_BITS = 26  # bits of a slice whose sums are taken over positions: 2**27 of them are exact


def matmul(x: Array, y: Array, /, *, xp: Namespace) -> Array:
    r"""Products of matrices (..., K) and (K, N), as float64: exact sums of products of slices, added with one rounding.

    Rows of x, and columns of y, are cut below their own largest magnitudes. More than 4096 channels are summed piece by
    piece, in parts that are carried.
    """
    channels = shape(x, xp=xp)[-1]
    bits = slice_bits(min(channels, LONGEST))
    powers = power_above_max(x, -1, xp), power_above_max(y, -2, xp)
    (x1, x2), (y1, y2) = (slices(each, power, bits, 2, xp) for each, power in zip((x, y), powers, strict=True))
    left, right = xp.concat([x1, x2], axis=-1), xp.concat([y2, y1], axis=-2)

    if channels <= LONGEST:  # so that the sum of both smaller products is exact, too: it is at most 3/4 2**53
        high, cross = xp.matmul(x1, y1), xp.matmul(left, right)
    else:
        pieces = [(start, min(start + LONGEST, channels)) for start in range(0, channels, LONGEST)]
        high = _piecewise(x1, y1, pieces, xp)
        cross = _piecewise(left, right, [*pieces, *((a + channels, b + channels) for a, b in pieces)], xp)
    scaled = xp.multiply(powers[0], xp.multiply(powers[1], 2.0 ** (-2 * bits)))
    return xp.multiply(xp.add(high, xp.multiply(cross, 2.0**-bits)), scaled)


def _piecewise(x: Array, y: Array, pieces: list[tuple[int, int]], xp: Namespace) -> Array:
    """Exact sums of products of integers over pieces of the channels, rounded once."""
    found = [split_carry(xp.matmul(x[..., start:stop], y[..., start:stop, :]), xp) for start, stop in pieces]
    return join_carry(tuple(add_in_order(part, xp) for part in zip(*found, strict=True)), xp)


def add_in_order(parts: tuple[Array, ...], xp: Namespace) -> Array:
    found, *others = parts
    for each in others:
        found = xp.add(found, each)
    return found


def matmul_over_positions(x: Array, y: Array, /, *, xp: Namespace) -> Array:
    r"""Sums over positions, :math:`\sum_p x_{pk} y_{pn}`, of (P, K) and (P, N), as float64.

    The bits of slices do not depend on P, nor do the exact sums depend on the pieces of 4096 positions that are taken.
    """
    bits = slice_bits(LONGEST)
    powers = power_above_max(x, -2, xp), power_above_max(y, -2, xp)
    (x1, x2), (y1, y2) = (slices(each, power, bits, 2, xp) for each, power in zip((x, y), powers, strict=True))
    sums = [_over_positions(*each, xp) for each in ((x1, y1), (x1, y2), (x2, y1))]
    cross = xp.multiply(xp.add(sums[1], sums[2]), 2.0**-bits)
    scaled = xp.multiply(xp.matrix_transpose(powers[0]), xp.multiply(powers[1], 2.0 ** (-2 * bits)))
    return xp.multiply(xp.add(sums[0], cross), scaled)


def _over_positions(x: Array, y: Array, xp: Namespace) -> Array:
    """Exact sums of products of integers, rounded once."""
    rows = shape(x, xp=xp)[0]
    if isinstance(rows, int) and rows <= LONGEST:
        return xp.matmul(xp.matrix_transpose(x), y)
    spare = (-rows) % LONGEST
    x, y = (_in_pieces(each, spare, xp) for each in (x, y))
    parts = split_carry(xp.matmul(xp.matrix_transpose(x), y), xp)
    return join_carry(tuple(xp.sum(part, axis=0) for part in parts), xp)


def _in_pieces(x: Array, spare: Any, xp: Namespace) -> Array:
    width = shape(x, xp=xp)[-1]
    filled = xp.concat([x, xp.zeros((spare, width), dtype=x.dtype, **on_device_of(x))], axis=0)
    return xp.reshape(filled, (-1, LONGEST, width))


def exact_sum(x: Array, axis: Any, /, *, xp: Namespace) -> Array:
    """Sums along axes, which stay, as float64: of slices, exactly, for up to 2**27 terms."""
    power = power_above_max(x, axis, xp)
    high, low = (xp.sum(each, axis=axis, keepdims=True) for each in slices(x, power, SUM_BITS, 2, xp))
    return xp.multiply(xp.add(high, xp.multiply(low, 2.0**-SUM_BITS)), xp.multiply(power, 2.0**-SUM_BITS))
