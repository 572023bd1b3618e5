"""Queries, keys, values, weights and gradients as slices: integers whose products, the scores, and sums are exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from attention_core._arithmetic.elementary import exp2_weight, tanh
from attention_core._arithmetic.exact import (
    CARRY,
    LOG2_E,
    LONGEST,
    join_carry,
    power_above_max,
    slice_bits,
    slices,
    split_carry,
    sum_exactly,
    to_float64,
    uncontracted,
)
from attention_core._arrays import Array, Arrays, Namespace, shape
from attention_core._attention.blocks.grid import Grid, Sample, matmul_per_group, pad
from attention_core._attention.blocks.scores import block_context
from attention_core.masks import Positions

SCORE_UNIT = LOG2_E / 256  # scores times this are the x of `exp2_weight`, which returns 2**(256 x)
# By the number of slices of a query, key or value:
WEIGHT_SLICES = {1: 1, 2: 3}  # how many a weight of the forward pass has
WEIGHT_BITS = {1: 24, 2: 18}  # bits of each
VALUE_BITS = {count: slice_bits(LONGEST, bits) for count, bits in WEIGHT_BITS.items()}  # those of a slice of a value
D_SCORE_BITS = 20
D_SCORE_FACTOR_BITS = slice_bits(LONGEST, D_SCORE_BITS)  # queries and keys, the other factor of d_scores
D_OUTPUT_BITS = 22  # the other factor of weights of up to 4 / 3
MIN_TOP, MAX_TOP = 2.0**-64, 2.0**127  # between these, the row maximum is the sum of three float32 numbers

Parts = Arrays


# Packed vectors, whose products are scores


def slice_query(grid: Grid, query: Array) -> Array:
    """Scaled queries, packed. A softcap takes scores in their own units, not in 256 ln 2."""
    xp, plan = grid.xp, grid.plan
    scale = plan.score_scale if plan.softcap is not None else plan.score_scale * SCORE_UNIT
    return pack_vectors(grid, xp.multiply(to_float64(query, xp), scale), first_last=False)


def slice_key(grid: Grid, key: Array) -> Array:
    """Keys, packed."""
    return pack_vectors(grid, to_float64(key, grid.xp), first_last=True)


def pack_vectors(grid: Grid, x: Array, *, first_last: bool) -> Array:
    r"""Slices of vectors (..., D) side by side, (..., 2 D), such that products of packed vectors are scores.

    Vectors of one side are :math:`[a_1, a_2 2^{-b}]`, those of the other :math:`[b_2 2^{-b}, b_1]`, each times its
    power of two. The first slice of a vector that is not finite is nan, which makes its scores nan.
    """
    xp, count, finite = grid.xp, grid.plan.num_slices, None
    if not grid.plan.all_finite:
        finite, x = xp.all(xp.isfinite(x), axis=-1, keepdims=True), grid.finite_or_zero(x)
    bits = slice_bits(x.shape[-1])
    power = power_above_max(x, -1, xp, grid.at_once)
    parts = slices(x, power, bits=bits, count=count, xp=xp)
    scaled = [xp.multiply(part, xp.multiply(power, 2.0 ** (-bits * n))) for n, part in enumerate(parts, start=1)]
    if finite is not None:
        scaled[0] = xp.where(finite, scaled[0], math.nan)
    return xp.concat(scaled[::-1] if first_last else scaled, axis=-1)


def packed_matmul(grid: Grid, query: Array, key: Array) -> Array:
    """Products of packed queries (G, R, m, 2 D) and keys (G, n, 2 D): (G, R, m, n).

    Each is the sum of two exact numbers, rounded once: of the product of the first slices, and of both mixed products.
    """
    xp, transposed = grid.xp, grid.xp.matrix_transpose(key)
    if grid.plan.num_slices == 1:
        return matmul_per_group(query, transposed, xp)
    width = shape(key, xp=xp)[-1] // 2
    scores = matmul_per_group(query[..., :width], transposed[..., width:, :], xp)
    scores += matmul_per_group(query, transposed, xp)
    return scores


# The scores of one block


class ExactScoreBlock(NamedTuple):
    """A block of queries against a block of keys."""

    scores: Array  # in units of 256 ln 2, (G, R, m, n); -inf where not allowed
    softcap_derivative: Array | None
    at: Positions | None


def exact_score_block(
    grid: Grid, sample: Sample, query: Array, key: Array, *, i: Any, j: Any, masked: bool
) -> ExactScoreBlock:
    """The scores of packed queries and keys: product, softcap, bias and mask.

    Masked scores are replaced by -inf; a bias that is -inf masks, too. There is no score modification in reproducible
    arithmetic.
    """
    plan, xp = grid.plan, grid.xp
    scores = packed_matmul(grid, query, key)
    at, bias, allowed = block_context(grid, sample, scores, i, j=j, masked=masked)
    derivative = None
    if plan.softcap is not None:
        scores, derivative = _soften(scores, plan.softcap, xp)
    if bias is not None:
        scores = xp.add(scores, uncontracted(xp.multiply(to_float64(bias, xp), SCORE_UNIT), xp))
    scores = scores if allowed is None else xp.where(allowed, scores, -math.inf)
    if derivative is not None and grid.may_mask:  # that of a masked key may be nan
        derivative = xp.where(xp.equal(scores, -math.inf), 0.0, derivative)
    return ExactScoreBlock(scores, derivative, at)


def _soften(scores: Array, softcap: float, xp: Namespace) -> tuple[Array, Array]:
    r"""Scores after the cap, :math:`c \tanh(s / c)`, in units of 256 ln 2, and their derivative by s."""
    ratio = tanh(uncontracted(xp.multiply(scores, 1 / softcap), xp), xp)
    derivative = xp.subtract(1.0, uncontracted(xp.multiply(ratio, ratio), xp))
    return uncontracted(xp.multiply(ratio, softcap * SCORE_UNIT), xp), derivative


# Sums of products of slices


def exact_weights(grid: Grid, scores: Array, anchor: Array) -> list[Array]:
    """The weights of scores relative to an anchor, in slices: in the memory of the scores, which are not used again."""
    num_slices = grid.plan.num_slices
    scores -= anchor
    return weight_slices(exp2_weight(scores, grid.xp), WEIGHT_BITS[num_slices], WEIGHT_SLICES[num_slices], grid)


def weight_slices(weights: Array, bits: int, count: int, grid: Grid) -> list[Array]:
    """Numbers of magnitude about 1 as integers; each slice holds the remainder of those before.

    Works in the memory of the weights, which are not used again: fresh memory takes longer than the rounding.
    """
    parts: list[Array] = []
    for n in range(count - 1):
        weights *= 2.0**bits
        parts.append(grid.xp.round(weights))
        weights -= parts[n]
    weights *= 2.0**bits
    return [*parts, grid.loops.inplace(grid.xp.round, weights)]


def concat_slices(x: Array, power: Array, bits: int, count: int, xp: Namespace) -> Array:
    """Slices side by side, (..., count * D), the first one at the end."""
    return xp.concat(slices(x, power, bits=bits, count=count, xp=xp)[::-1], axis=-1)


def sliced_matmul(
    weights: list[Array], x: Array, multiply: Callable[[Array, Array, Namespace], Array], xp: Namespace
) -> Parts:
    """Exact products of slices of weights with those of `concat_slices`.

    The first slice of the weights is multiplied by both slices of ``x``, the second one by the first slice of ``x``.
    The product of both second slices is below the last bit that counts in a gradient.
    """
    product = multiply(weights[0], x, xp)
    if len(weights) == 1:
        return (product,)
    width = shape(x, xp=xp)[-1] // 2
    return product, multiply(weights[1], x[..., width:], xp)


def value_widths(width: Any, count: int, carry: bool) -> list[Any]:
    """The widths of exact sums of weighted values, which `join_value_sums` takes, for values of a width."""
    return [count * width] * (WEIGHT_SLICES[count] * (2 if carry else 1))


def join_value_sums(sums: Parts, count: int, carry: bool, xp: Namespace) -> list[Array]:
    """The sums of weighted values, one for each slice of the weights, in units of the product with the first of values.

    Those of all slices of the values, in the form of `with_carry`, are added with one rounding.
    """
    units = (CARRY, 1.0) if carry else (1.0,)
    widths, joined = [shape(sums[0], xp=xp)[-1] // count] * count, []
    for n in range(0, len(sums), len(units)):
        terms = []
        for unit, part in zip(units, sums[n : n + len(units)], strict=True):
            columns = split_columns(part, widths)
            terms += [xp.multiply(x, unit * 2.0 ** (-VALUE_BITS[count] * k)) for k, x in enumerate(columns[::-1])]
        joined.append(xp.add(*sum_exactly(terms, xp)))
    return joined


def combine_slices(sums: Parts, left_bits: int, right_bits: int, xp: Namespace) -> Array:
    """The number that sums of `sliced_matmul` stand for, in units of the product of both first slices."""
    if len(sums) == 1:
        return sums[0]
    by_first, by_second = sums
    width = shape(by_second, xp=xp)[-1]
    low, high = by_first[..., :width], by_first[..., width:]
    return xp.add(high, xp.add(xp.multiply(low, 2.0**-right_bits), xp.multiply(by_second, 2.0**-left_bits)))


# Sums that may exceed 53 bits


def needs_carry(grid: Grid, side: int) -> bool:
    """Whether sums over queries (side 0) or keys (side 1) may have so many terms that 53 bits do not hold them."""
    length = grid.lengths[side]
    if side == 0:
        length = length if grid.plan.num_queries is None else grid.plan.num_queries
        length = length * grid.dims[2] if isinstance(grid.dims[2], int) else None
    return not isinstance(length, int) or length > LONGEST


def with_carry(sums: Parts, carry: bool, xp: Namespace) -> Parts:
    """Sums in the form in which they are added up: as two parts each where they may exceed 53 bits."""
    return tuple(part for total in sums for part in split_carry(total, xp)) if carry else sums


def without_carry(parts: Parts, carry: bool, xp: Namespace) -> Parts:
    """The inverse of `with_carry`, rounded once."""
    return tuple(join_carry(pair, xp) for pair in zip(parts[::2], parts[1::2], strict=True)) if carry else parts


def slice_widths(last: Any, count: int, carry: bool) -> list[Any]:
    """The widths of the parts of sums over vectors of width ``last``."""
    return [width for width in ([2 * last, last] if count == 2 else [last]) for _ in range(2 if carry else 1)]


def split_columns(x: Array, widths: list[Any]) -> Parts:
    """The inverse of `xp.concat` along the last axis, for parts of these widths."""
    ends = list(itertools.accumulate(widths))
    return tuple([x[..., end - width : end] for width, end in zip(widths, ends, strict=True)])


def pad_rows(grid: Grid, rows: Array) -> Array:
    """Rows with zeros at the end, like the queries where all blocks have one size."""
    if not grid.loops.traced:
        return rows
    return pad(rows, -2, shape(grid.operands.query, xp=grid.xp)[-2] - grid.lengths[0], grid.xp)
