"""Exact sums of products in float64, which no order of addition changes, and weights that are cut for them once."""

from __future__ import annotations

import functools
from typing import Any

from .._arrays import Array, Arrays, Namespace, on_device_of, scalar_like, shape, upcast
from .._backend import Backend, Operation, Ranks, register
from ..parameters import PreparedWeight
from .exact import (
    LONGEST,
    join_carry,
    largest_magnitude,
    power_above_max,
    round_to_float32,
    slice_bits,
    slices,
    split_carry,
    to_float64,
)
from .operations import Constants, in_row_blocks, rounded_once, run


def _slice_both(x: Array, y: Array, powers: tuple[Array, Array], *, bits: int, xp: Namespace) -> Any:
    """Two slices of each factor of a product, relative to its power of two."""
    return (slices(factor, power, bits=bits, count=2, xp=xp) for factor, power in zip((x, y), powers, strict=True))


def row_dots(x: Array, y: Array, xp: Namespace) -> Array:
    """Inner products of rows (..., C), as float64: (..., 1)."""
    bits = slice_bits(x.shape[-1])
    powers = power_above_max(x, -1, xp), power_above_max(y, -1, xp)
    (x1, x2), (y1, y2) = _slice_both(x, y, powers, bits=bits, xp=xp)
    high = xp.sum(xp.multiply(x1, y1), axis=-1, keepdims=True)
    cross = (xp.sum(xp.multiply(*pair), axis=-1, keepdims=True) for pair in ((x1, y2), (x2, y1)))
    low = xp.multiply(xp.add(*cross), 2.0**-bits)
    return xp.multiply(xp.add(high, low), xp.multiply(xp.multiply(*powers), 2.0 ** (-2 * bits)))


LEAST = 2.0**-900  # a power of two above terms; so all integers and powers are normal numbers
SUM_BITS = 26  # bits of a slice that is summed over positions: sums of up to 2**27 of them are exact


def matmul(x: Array, y: Array, /, *, xp: Namespace) -> Array:
    r"""Matrix product of (..., K) and (K, N), as float64: exact sums of products of slices, added with one rounding.

    The slices of a row of x, or of a column of y, are relative to its largest magnitude. More than 4096 channels are
    summed in chunks, whose sums are added as two parts each (`split_carry`).
    """
    channels = shape(x, xp=xp)[-1]
    high, low, power = cut_columns(y, channels, xp=xp)
    bits = slice_bits(min(channels, LONGEST))
    return join_products(*multiply_slices(x, high, low, xp=xp), power, bits=bits, xp=xp)


def cut_columns(y: Array, channels: int, /, *, xp: Namespace) -> tuple[Array, Array, Array]:
    """Two slices of the second factor of a product, (K, N), and the powers of two of its columns, (1, N)."""
    power = power_above_max(y, -2, xp)
    high, low = slices(y, power, bits=slice_bits(min(channels, LONGEST)), count=2, xp=xp)
    return high, low, power


def multiply_slices(x: Array, high: Array, low: Array, /, *, xp: Namespace) -> tuple[Array, Array, Array]:
    """The product of the first slices, the sum of both mixed products, and the powers of two of rows of x."""
    rows, channels = shape(x, xp=xp)[-2:]
    row_power = power_above_max(x, -1, xp)
    x1, x2 = slices(x, row_power, bits=slice_bits(min(channels, LONGEST)), count=2, xp=xp)
    if channels > LONGEST:
        return _chunked_matmul(((x1, high),), xp), _chunked_matmul(((x1, low), (x2, high)), xp), row_power
    # The sum of both smaller products is exact, too: it is at most 3/4 2**53.
    if not isinstance(rows, int):
        return xp.matmul(x1, high), xp.add(xp.matmul(x1, low), xp.matmul(x2, high)), row_power
    by_high = xp.matmul(xp.concat([x1, x2], axis=-2), high)  # which is read once: with few rows, that takes the time
    large, cross = by_high[..., :rows, :], by_high[..., rows:, :]
    cross += xp.matmul(x1, low)
    return large, cross, row_power


def join_products(large: Array, cross: Array, row_power: Array, power: Array, /, *, bits: int, xp: Namespace) -> Array:
    """What `multiply_slices` stands for, added with one rounding, in the memory of its products."""
    cross *= 2.0**-bits
    large += cross
    large *= xp.multiply(power, 2.0 ** (-2 * bits))
    large *= row_power
    return large


def _chunked_matmul(pairs: tuple[tuple[Array, Array], ...], xp: Namespace) -> Array:
    """The sum of products of integers, exact over chunks of the channels, rounded once."""
    sums, channels = [], shape(pairs[0][0], xp=xp)[-1]
    for x, y in pairs:
        for start in range(0, channels, LONGEST):
            stop = min(start + LONGEST, channels)
            sums.append(split_carry(xp.matmul(x[..., start:stop], y[..., start:stop, :]), xp))
    return join_carry(tuple(add_in_order(part, xp) for part in zip(*sums, strict=True)), xp)


def add_in_order(parts: Arrays, xp: Namespace) -> Array:
    """The sum of arrays, added from first to last."""
    return functools.reduce(xp.add, parts)


def matmul_over_positions(x: Array, y: Array, /, *, xp: Namespace) -> Array:
    r"""Sums over positions, :math:`\sum_p x_{pk} y_{pn}`, of (P, K) and (P, N), as float64.

    The bits of a slice do not depend on P. The sums are exact, so their chunks of 4096 positions do not show.
    """
    bits = slice_bits(LONGEST)
    powers = power_above_max(x, -2, xp), power_above_max(y, -2, xp)
    (x1, x2), (y1, y2) = _slice_both(x, y, powers, bits=bits, xp=xp)
    sums = [_matmul_transposed(*pair, xp) for pair in ((x1, y1), (x1, y2), (x2, y1))]
    cross = xp.multiply(xp.add(sums[1], sums[2]), 2.0**-bits)
    scaled = xp.multiply(xp.matrix_transpose(powers[0]), xp.multiply(powers[1], 2.0 ** (-2 * bits)))
    return xp.multiply(xp.add(sums[0], cross), scaled)


def _matmul_transposed(x: Array, y: Array, xp: Namespace) -> Array:
    """Exact sums over positions of products of integers, rounded once."""
    rows = shape(x, xp=xp)[0]
    if isinstance(rows, int) and rows <= LONGEST:
        return xp.matmul(xp.matrix_transpose(x), y)
    spare = (-rows) % LONGEST
    x, y = (_in_chunks(factor, spare, xp) for factor in (x, y))
    parts = split_carry(xp.matmul(xp.matrix_transpose(x), y), xp)
    return join_carry(tuple(xp.sum(part, axis=0) for part in parts), xp)


def _in_chunks(x: Array, spare: Any, xp: Namespace) -> Array:
    """Positions as chunks of 4096, (chunks, 4096, C), the last one filled up with zeros."""
    width = shape(x, xp=xp)[-1]
    padded = xp.concat([x, xp.zeros((spare, width), dtype=x.dtype, **on_device_of(x))], axis=0)
    return xp.reshape(padded, (-1, LONGEST, width))


def exact_sum(x: Array, axis: Any, /, *, bits: int = SUM_BITS, ranks: Ranks | None = None, xp: Namespace) -> Array:
    """Sums along axes, which stay with length 1, as float64: exact sums of slices of so many bits.

    For up to 2**(53 - bits) terms, each off by at most 2**(1/2 - 2 bits) of the largest, or `LEAST` where that is
    smaller. With ranks, those of all.
    """
    power = power_above_max(x if ranks is None else ranks.largest(largest_magnitude(x, axis, xp)), axis, xp)
    power = xp.maximum(power, scalar_like(LEAST, power, xp))
    high, low = (xp.sum(part, axis=axis, keepdims=True) for part in slices(x, power, bits=bits, count=2, xp=xp))
    if ranks is not None:
        high, low = ranks.total(high), ranks.total(low)
    return xp.multiply(xp.add(high, xp.multiply(low, 2.0**-bits)), xp.multiply(power, 2.0**-bits))


PRODUCTS = 2**18  # elements of a product: with fewer rows at a time, libraries multiply matrices more slowly
REFUSAL = "expected weights that are not prepared where gradients are computed; got prepared ones"


def prepare(weight: Array, /, *, xp: Namespace) -> PreparedWeight:
    """Cut a weight (in, out) as `matmul` cuts it."""
    high, low, power = run(CUT, Constants(), upcast(weight, xp=xp), xp=xp)
    return PreparedWeight(high, low, power, like=xp.zeros((0,), dtype=weight.dtype, **on_device_of(weight)))


def _cut(plan: Constants, arrays: Arrays, backend: Backend) -> Arrays:
    xp, (weight,) = backend.namespace, arrays
    return cut_columns(to_float64(weight, xp), shape(weight, xp=xp)[0], xp=xp)


def _no_gradient(*_: object) -> Arrays:
    raise TypeError(REFUSAL)


CUT = register("reproducible.cut", Operation(_cut, _no_gradient, _cut, needs_float64=True))


def affine_by_slices(x: Array, cut: Arrays, bias: Array | None, /, *, xp: Namespace) -> Array:
    """An affine map of rows, rounded once, by the two slices and the powers of two of its weight."""
    high, low, power = cut
    channels, width = shape(high, xp=xp)
    bits = slice_bits(min(channels, LONGEST))
    bias = None if bias is None else to_float64(bias, xp)

    def add_up(large: Array, cross: Array, row_power: Array) -> Array:
        y = join_products(large, cross, row_power, power, bits=bits, xp=xp)
        return round_to_float32(y if bias is None else xp.add(y, bias), xp)

    def map_rows(rows: Array) -> Array:
        return in_row_blocks(add_up, multiply_slices(to_float64(rows, xp), high, low, xp=xp), xp=xp)

    return in_row_blocks(map_rows, (x,), width=width, block=PRODUCTS, xp=xp)


def _affine(xp: Namespace, plan: Constants, x: Array, *cut_and_bias: Array) -> Array:
    cut, bias = cut_and_bias[:3], cut_and_bias[3:]
    return affine_by_slices(x, cut, *(bias or (None,)), xp=xp)


def _abstract(xp: Namespace, plan: Constants, x: Array, high: Array, *_: Array) -> Array:
    return xp.matmul(x, xp.astype(high, x.dtype))


PREPARED_AFFINE = rounded_once(
    "reproducible.prepared_affine", _affine, _no_gradient, abstract=_abstract, raw_forward=True
)
