"""Numbers as slices whose products and sums are exact."""

from __future__ import annotations

import itertools
import math
from typing import Any

from attention_core._arithmetic.exact import (
    LOG2_E,
    LONGEST,
    join_carry,
    power_above_max,
    round_to_float32,
    slice_bits,
    slices,
    split_carry,
    to_float64,
)
from attention_core._arrays import Array, Namespace, shape
from attention_core._attention.blocks.grid import Grid
from attention_core._attention.blocks.nonfinite import finite_or_zero
from attention_core._attention.blocks.plan import Plan
from attention_core._attention.blocks.scores import matmul_per_group

SCORE_UNIT = LOG2_E / 256  # of scores, so that the eighth square of a power of 2 is the exponential
WEIGHT_BITS = {1: 24, 2: 18}  # bits of a slice of a weight, by the number of slices
VALUE_BITS = {count: slice_bits(LONGEST, bits) for count, bits in WEIGHT_BITS.items()}
D_SCORE_BITS = 20
D_SCORE_FACTOR_BITS = slice_bits(LONGEST, D_SCORE_BITS)
D_OUTPUT_BITS = 22  # bits of slices beside weights that reach 4 / 3
MIN_TOP, MAX_TOP = 2.0**-64, 2.0**127  # between which the largest score is the sum of three numbers of float32


def _query_scale(plan: Plan) -> float:
    """What queries are multiplied by before they are cut: what a cap takes is in the units of scores."""
    scale = plan.score_scale
    return scale if plan.softcap is not None else scale * SCORE_UNIT


def pack_vectors(tiles: Grid, x: Array, *, first_last: bool) -> Array:
    r"""Vectors (..., D) as slices side by side, so that products of packed ones are scores.

    Of one side :math:`[a_1, a_2 2^{-b}]`, of the other :math:`[b_2 2^{-b}, b_1]`, each times its power of two.
    """
    xp, count = tiles.xp, tiles.plan.num_slices
    allowed = xp.all(xp.isfinite(x), axis=-1, keepdims=True)
    x = finite_or_zero(tiles, x)
    bits = slice_bits(shape(x, xp=xp)[-1])
    power = power_above_max(x, -1, xp)
    parts = slices(x, power, bits=bits, count=count, xp=xp)
    scaled = [
        xp.multiply(part, xp.multiply(power, 2.0 ** (-bits * place))) for place, part in enumerate(parts, start=1)
    ]
    if not tiles.plan.all_finite:
        scaled[0] = xp.where(allowed, scaled[0], math.nan)
    return xp.concat(scaled[::-1] if first_last else scaled, axis=-1)


def sliced_scores(query: Array, key: Array, xp: Namespace) -> Array:
    """Products of packed queries (G, R, m, 2 D) and keys (G, n, 2 D): (G, R, m, n), each a sum of two exact numbers."""
    across = xp.matrix_transpose(key)
    width = shape(key, xp=xp)[-1] // 2
    scores = matmul_per_group(query[..., :width], across[..., width:, :], xp)
    scores += matmul_per_group(query, across, xp)
    return scores


def unsliced_scores(query: Array, key: Array, xp: Namespace) -> Array:
    return matmul_per_group(query, xp.matrix_transpose(key), xp)


def weight_slices(weights: Array, bits: int, count: int, xp: Namespace) -> list[Array]:
    """Weights of at most 1, which are not used again, as integers: of two, the second holds what the first has left."""
    weights *= 2.0**bits
    high = xp.round(weights)
    if count == 1:
        return [high]
    weights -= high
    weights *= 2.0**bits
    return [high, xp.round(weights)]


def concat_slices(x: Array, power: Array, bits: int, count: int, xp: Namespace) -> Array:
    """Slices (..., count * D), the last one first, so that the first alone stands at the end."""
    return xp.concat(slices(x, power, bits=bits, count=count, xp=xp)[::-1], axis=-1)


def sliced_matmul(weights: list[Array], x: Array, multiply: Any, xp: Namespace) -> tuple[Array, ...]:
    """Exact sums of products of slices: with the first of the weights all of the others', with the second the first."""
    found = multiply(weights[0], x, xp)
    if len(weights) == 1:
        return (found,)
    width = shape(x, xp=xp)[-1] // 2
    return found, multiply(weights[1], x[..., width:], xp)


def combine_slices(sums: tuple[Array, ...], left: int, right: int, xp: Namespace) -> Array:
    r"""What such sums stand for, in units of the product of the first slices."""
    if len(sums) == 1:
        return sums[0]
    both, beside_first = sums
    width = shape(beside_first, xp=xp)[-1]
    low, high = both[..., :width], both[..., width:]
    return xp.add(high, xp.add(xp.multiply(low, 2.0**-right), xp.multiply(beside_first, 2.0**-left)))


def with_carry(sums: tuple[Array, ...], carry: bool, xp: Namespace) -> tuple[Array, ...]:
    """Sums as they are added up: where they may exceed 53 bits, each in two parts."""
    return tuple(part for each in sums for part in split_carry(each, xp)) if carry else sums


def without_carry(parts: tuple[Array, ...], carry: bool, xp: Namespace) -> tuple[Array, ...]:
    return tuple(join_carry(each, xp) for each in zip(parts[::2], parts[1::2], strict=True)) if carry else parts


def slice_widths(last: Any, count: int, carry: bool) -> list[Any]:
    """How wide the parts of sums with vectors of some width are."""
    return [width for width in ([2 * last, last] if count == 2 else [last]) for _ in range(2 if carry else 1)]


def split_columns(x: Array, widths: list[Any]) -> tuple[Array, ...]:
    """Parts that were put side by side."""
    ends = list(itertools.accumulate(widths))
    return tuple(x[..., end - width : end] for width, end in zip(widths, ends, strict=True))


def needs_carry(tiles: Grid, side: int) -> bool:
    """Whether so many terms are added up that integers of 53 bits do not hold them."""
    length = tiles.lengths[side]
    if side == 0:
        times = shape(tiles.operands.query, xp=tiles.xp)[2]
        length = length * times if isinstance(times, int) else None
    return not isinstance(length, int) or length > LONGEST


def slice_query(tiles: Grid, query: Array) -> Array:
    xp = tiles.xp
    return pack_vectors(tiles, xp.multiply(to_float64(query, xp), _query_scale(tiles.plan)), first_last=False)


def slice_key(tiles: Grid, key: Array) -> Array:
    return pack_vectors(tiles, to_float64(key, tiles.xp), first_last=True)


Parts = tuple[Array, ...]


def as_three_float32(x: Array, xp: Namespace) -> list[Array]:
    """Numbers of float64 as sums of three of float32."""
    parts = []
    for _ in range(3):
        parts.append(round_to_float32(x, xp))
        x = xp.subtract(x, xp.astype(parts[-1], xp.float64))
    return parts


def from_three_float32(parts: Array, xp: Namespace) -> Array:
    """The inverse of `thirds`, of parts side by side: (..., 3) -> (..., 1)."""
    first, second, third = (parts[..., place : place + 1] for place in range(3))
    return xp.add(first, xp.add(second, third))
