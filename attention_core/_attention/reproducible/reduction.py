"""Exact sums of weights and weighted values over all keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from attention_core._arithmetic.exact import (
    divide_rows,
    power_above_max,
    round_to_float32,
    to_float64,
    uncontracted,
)
from attention_core._arithmetic.operations import in_row_blocks
from attention_core._arrays import Array, Arrays, Namespace, on_device_of, shape, zeros_with
from attention_core._attention.blocks.accumulators import concat_blocks, row_accumulators
from attention_core._attention.blocks.grid import (
    Grid,
    Sample,
    dropout_of,
    for_each_sample,
    may_mask,
    num_heads_of,
    sample_at,
    sample_slice,
    work_of,
)
from attention_core._attention.blocks.visits import make_visits, visit_blocks
from attention_core._attention.call import apply_dropout
from attention_core._attention.reproducible.block import ExactScoreBlock, exact_score_block
from attention_core._attention.reproducible.slices import (
    MAX_TOP,
    MIN_TOP,
    SCORE_UNIT,
    VALUE_BITS,
    WEIGHT_BITS,
    WEIGHT_SLICES,
    Parts,
    concat_slices,
    exact_weights,
    join_value_sums,
    needs_carry,
    slice_key,
    slice_query,
    value_widths,
    weigh,
    with_carry,
)

# Blocks of queries, and the scores of their keys


class QueryRows(NamedTuple):
    """A block of queries in slices, and which blocks of keys it visits."""

    grid: Grid
    sample: Sample
    query: Array
    keys: Array
    i: Any  # index of the block of queries
    visits: tuple[Any, Any, Any]


def scores_at(rows: QueryRows, masked: bool, j: Any) -> ExactScoreBlock:
    """The scores of a block of queries and the block of keys at ``j``."""
    grid = rows.grid
    keys = grid.loops.block(rows.keys, j, grid.sizes[1], -2)
    return exact_score_block(grid, rows.sample, rows.query, keys, i=rows.i, j=j, masked=masked)


def for_each_rows(
    grid: Grid,
    compute: Callable[[QueryRows, Any], Arrays],
    accumulators: tuple[Any, ...],
    prepare: Callable[[Sample], Any] = lambda batch: None,
) -> Arrays:
    """Arrays (B, G, R, M, ...) of what ``compute(rows, prepared)`` returns for each block of queries.

    ``prepared`` is what ``prepare(sample)`` returns, which is called once for all blocks of queries of a batch element.
    """
    visits, loops = make_visits(grid, by_key=False), grid.loops

    def add_sample(index: Any, accumulators: Any) -> Any:
        sample = sample_at(grid, index)
        query, keys, prepared = slice_query(grid, sample.query), slice_key(grid, sample.key), prepare(sample)

        def add_rows(i: Any, accumulators: Any) -> Any:
            block = loops.block(query, i, grid.sizes[0], -2)
            rows = QueryRows(grid, sample, block, keys, i=i, visits=visits.of(loops, sample.index, i))
            pairs = zip(accumulators, compute(rows, prepared), strict=True)
            row_block = index * grid.counts[0] + i
            return tuple(loops.add_block(accumulator, row_block, block) for accumulator, block in pairs)

        return loops.for_each(grid.counts[0], add_rows, accumulators, work_of(grid, sample))

    accumulators = for_each_sample(grid, add_sample, accumulators)
    return tuple(concat_blocks(grid, accumulator, 0) for accumulator in accumulators)


# The first pass: row maxima


def max_scores(rows: QueryRows) -> Array:
    """The largest score of each query, (G, R, m, 1): -inf where there is none."""
    grid, (next_block, whole, seen) = rows.grid, rows.visits
    xp = grid.xp

    def add_keys(masked: bool, step: Any, row_max: Array) -> Array:
        scores = scores_at(rows, masked, next_block(step)).scores
        return xp.maximum(row_max, xp.max(scores, axis=-1, keepdims=True))

    *dims, _ = shape(rows.query, xp=xp)
    lowest = xp.full((*dims, 1), -math.inf, dtype=xp.float64, **on_device_of(rows.query))
    return visit_blocks(grid.loops, whole, seen, add_keys, state=lowest)


def anchor_max(row_max: Array, xp: Namespace) -> Array:
    """The number that is subtracted from scores: the row maximum, 0 for fully masked rows, nan above float32."""
    size = xp.abs(row_max)
    row_max = xp.where(xp.logical_or(xp.equal(row_max, -math.inf), xp.less(size, MIN_TOP)), 0.0, row_max)
    return xp.where(xp.greater_equal(xp.abs(row_max), MAX_TOP), math.nan, row_max)


# The second pass: sums


class Reduction(NamedTuple):
    """How the sums over all keys are taken, and what is made of them.

    ``finish(values, sums)`` returns arrays (G, R, m, ...) for a block of queries.
    """

    finish: Callable[[SlicedValues, Sums], Arrays]
    widths: tuple[Any, ...]  # of the arrays that ``finish`` returns
    dtype: str  # likewise
    value_part: Callable[[Array], Array]  # the part of the values that is averaged, such as the finite ones
    # largest scores, (B, G, R, M, 1), and powers of two above the values, (B, G, 1, E); None for those of these keys
    extent: tuple[Array, Array] | None = None


class SlicedValues(NamedTuple):
    """The values of one element of the batch in slices, and which numbers all sums are relative to."""

    values: Array  # and a column of ones, (G, N, count * E + 1)
    power: Array  # above all values of a channel, (G, 1, E)
    row_max: Array | None  # (G, R, M, 1); None if that of the keys at hand is to be found


class Sums(NamedTuple):
    """Exact sums over all keys, and the number that scores are relative to."""

    anchor: Array  # see `anchor_max`
    values: Parts
    weights: Parts


def reduce_keys(grid: Grid, reduction: Reduction) -> Arrays:
    """The results of ``reduction.finish`` for all queries, (B, G, R, M, ...)."""

    def finish_rows(rows: QueryRows, values: SlicedValues) -> Arrays:
        return reduction.finish(values, _sum_over_keys(rows, values))

    accumulators = row_accumulators(grid, *reduction.widths, dtype=reduction.dtype)
    return for_each_rows(grid, finish_rows, accumulators, functools.partial(_slice_values, grid, reduction))


def _slice_values(grid: Grid, reduction: Reduction, sample: Sample) -> SlicedValues:
    xp, count = grid.xp, grid.plan.num_slices
    values = reduction.value_part(to_float64(sample.value, xp))
    if reduction.extent is None:
        row_max, power = None, power_above_max(values, -2, xp)
    else:
        row_max, power = (sample_slice(grid, x, sample.index, sample.head) for x in reduction.extent)
    slices = concat_slices(values, power, VALUE_BITS[count], count, xp=xp)
    ones = xp.ones((*shape(values, xp=xp)[:-1], 1), dtype=xp.float64, **on_device_of(values))
    return SlicedValues(xp.concat([slices, ones], axis=-1), power, row_max)


def _sum_over_keys(rows: QueryRows, values: SlicedValues) -> Sums:
    grid, xp = rows.grid, rows.grid.xp
    if values.row_max is None and isinstance(grid.counts[1], int) and grid.counts[1] == 1:
        block = scores_at(rows, may_mask(grid), 0)  # one block of scores serves both passes
        anchor = anchor_max(xp.max(block.scores, axis=-1, keepdims=True), xp)
        return Sums(anchor, *_block_sums(rows, values, anchor, block, j=0))
    if values.row_max is None:
        row_max = max_scores(rows)
    else:
        row_max = grid.loops.block(values.row_max, rows.i, grid.sizes[0], -2)
    anchor = anchor_max(row_max, xp)
    next_block, whole, seen = rows.visits

    def add_keys(masked: bool, step: Any, sums: Any) -> Any:
        j = next_block(step)
        new = _block_sums(rows, values, anchor, scores_at(rows, masked, j), j=j)
        return tuple(tuple(map(xp.add, *pair)) for pair in zip(sums, new, strict=True))

    zeros = _zero_sums(rows, anchor)
    return Sums(anchor, *visit_blocks(grid.loops, whole, seen, add_keys, state=zeros))


def _zero_sums(rows: QueryRows, like: Array) -> tuple[Parts, ...]:
    grid, xp, count = rows.grid, rows.grid.xp, rows.grid.plan.num_slices
    carry = needs_carry(grid, 1)
    *dims, _ = shape(rows.query, xp=xp)
    width = shape(grid.operands.value, xp=xp)[-1]
    widths = value_widths(width, count, carry), [1] * (WEIGHT_SLICES[count] * (2 if carry else 1))
    return tuple(tuple(zeros_with(like, *dims, last, xp=xp) for last in lasts) for lasts in widths)


def _block_sums(
    rows: QueryRows, values: SlicedValues, anchor: Array, block: ExactScoreBlock, *, j: Any
) -> tuple[Parts, ...]:
    """Sums over one block of keys: of weighted values, and of weights."""
    grid, xp = rows.grid, rows.grid.xp
    carry, dropout = needs_carry(grid, 1), dropout_of(grid)
    weights = exact_weights(grid, block.scores, anchor)
    kept = [apply_dropout(part, dropout, block.at, num_heads_of(grid), xp=xp) for part in weights]
    value_block = grid.loops.block(values.values, j, grid.sizes[1], -2)
    products = weigh(grid, kept, value_block)
    value_sums = tuple(product[..., :-1] for product in products)
    if dropout is None:
        weight_sums = tuple(product[..., -1:] for product in products)
    else:
        weight_sums = tuple(xp.sum(part, axis=-1, keepdims=True) for part in weights)
    return with_carry(value_sums, carry, xp), with_carry(weight_sums, carry, xp)


# Averages


def weighted_totals(
    value_sums: Parts, weight_sums: Parts, value_power: Array, *, count: int, carry: bool, xp: Namespace
) -> tuple[Array, Array]:
    """Sums of weighted values and of weights, from the integers that stand for them, with so many slices of a value.

    The sum of each slice of the weights is rounded to float64, and these are added, the smallest first. Values have all
    of their bits in each, so nothing shows of the power that these were cut by.
    """
    bits = WEIGHT_BITS[count]
    total, weight = (
        functools.reduce(lambda rest, part: xp.add(part, xp.multiply(rest, 2.0**-bits)), reversed(parts))
        for parts in (join_value_sums(value_sums, count, carry, xp), weight_sums)
    )
    unit = xp.multiply(xp.expand_dims(value_power, axis=-3), 2.0 ** -(bits + VALUE_BITS[count]))
    return xp.multiply(total, unit), xp.multiply(weight, 2.0**-bits)


def divide_by_weight(total: Array, weight: Array, factor: float, xp: Namespace) -> Array:
    """The output, times a factor: 0 for fully masked rows."""

    def divide(total: Array, weight: Array) -> Array:
        output = divide_rows(total, xp.where(xp.equal(weight, 0.0), 1.0, weight), xp)
        return round_to_float32(output if factor == 1 else xp.multiply(uncontracted(output, xp), factor), xp)

    return in_row_blocks(divide, (total, weight), xp=xp)


def logsumexp_of(anchor: Array, logarithm: Array, none: Array, *, xp: Namespace) -> Array:
    """The logsumexp of the scores, by the logarithm to base 2 of the sum of weights: -inf for fully masked rows."""
    exponent = xp.add(anchor, xp.multiply(logarithm, 1 / 256))
    logsumexp = uncontracted(xp.multiply(exponent, 1 / SCORE_UNIT), xp)
    return round_to_float32(xp.where(none, -math.inf, logsumexp), xp)
