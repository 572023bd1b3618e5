"""Exact sums of weights and weighted values over all keys."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from attention_core._arithmetic.exact import divide_rows, power_above_max, round_to_float32, to_float64, uncontracted
from attention_core._arithmetic.operations import in_row_blocks
from attention_core._arrays import Array, Arrays, Namespace, on_device_of, shape, zeros_with
from attention_core._attention.blocks.grid import Grid, Sample, matmul_per_group
from attention_core._attention.blocks.visits import make_visits, visit_blocks
from attention_core._attention.reproducible import slices
from attention_core._attention.reproducible.slices import Parts

# Blocks of queries, and the scores of their keys


class QueryRows(NamedTuple):
    """A block of queries in slices, next to all keys of its sample."""

    grid: Grid
    sample: Sample
    query: Array
    keys: Array
    i: Any  # index of the block of queries

    def visit(self, absorb: Callable[[bool, Any, Any], Any], state: Any) -> Any:
        """Absorb the blocks of keys that these queries attend to."""
        return visit_blocks(self.grid, self.sample.index, self.i, absorb, state)

    def block_of(self, x: Array) -> Array:
        """The block of these queries, of an array (B, G, R, M, ...)."""
        of_sample = self.grid.part_of(x, self.sample.index, self.sample.head)
        return self.grid.loops.block(of_sample, self.i, self.grid.sizes[0], -2)


def scores_at(rows: QueryRows, masked: bool, j: Any) -> slices.ExactScoreBlock:
    """The scores of a block of queries and the block of keys at ``j``."""
    grid = rows.grid
    keys = grid.loops.block(rows.keys, j, grid.sizes[1], -2)
    return slices.exact_score_block(grid, rows.sample, rows.query, keys, i=rows.i, j=j, masked=masked)


def for_each_rows(
    grid: Grid,
    compute: Callable[[QueryRows, Any], Arrays],
    accumulators: tuple[Any, ...],
    prepare: Callable[[Sample], Any] = lambda batch: None,
) -> Arrays:
    """Arrays (B, G, R, M, ...) of what ``compute(rows, prepared)`` returns for each block of queries.

    ``prepared`` is what ``prepare(sample)`` returns, which is called once for all blocks of queries of a batch element.
    """
    loops, grid = grid.loops, grid._replace(visits=make_visits(grid, by_key=False))

    def add_sample(index: Any, accumulators: Any) -> Any:
        sample = grid.sample_at(index)
        query, keys, prepared = (
            slices.slice_query(grid, sample.query),
            slices.slice_key(grid, sample.key),
            prepare(sample),
        )

        def add_rows(i: Any, accumulators: Any) -> Any:
            rows = QueryRows(grid, sample, loops.block(query, i, grid.sizes[0], -2), keys, i=i)
            row_blocks = itertools.repeat(index * grid.counts[0] + i, len(accumulators))
            return tuple(map(loops.add_block, accumulators, row_blocks, compute(rows, prepared)))

        return loops.for_each(grid.counts[0], add_rows, accumulators, grid.work)

    return tuple(grid.concat_blocks(grid.for_each_sample(add_sample, accumulators), 0))


# The first pass: row maxima


def max_scores(rows: QueryRows) -> Array:
    """The largest score of each query, (G, R, m, 1): -inf where there is none."""
    xp = rows.grid.xp

    def add_keys(masked: bool, j: Any, row_max: Array) -> Array:
        scores = scores_at(rows, masked, j).scores
        return xp.maximum(row_max, xp.max(scores, axis=-1, keepdims=True))

    *dims, _ = shape(rows.query, xp=xp)
    lowest = xp.full((*dims, 1), -math.inf, dtype=xp.float64, **on_device_of(rows.query))
    return rows.visit(add_keys, lowest)


def anchor_max(row_max: Array, xp: Namespace) -> Array:
    """The number that is subtracted from scores: the row maximum, 0 for fully masked rows, nan above float32."""
    size = xp.abs(row_max)
    row_max = xp.where(xp.logical_or(xp.equal(row_max, -math.inf), xp.less(size, slices.MIN_TOP)), 0.0, row_max)
    return xp.where(xp.greater_equal(xp.abs(row_max), slices.MAX_TOP), math.nan, row_max)


# The second pass: sums


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


def reduce_keys(
    grid: Grid,
    finish: Callable[[SlicedValues, Sums], Arrays],
    stacks: tuple[Any, ...],
    extent: tuple[Array, Array] | None = None,
) -> Arrays:
    """The results of ``finish(values, sums)``, of a stack (G, R, m, ...) each, for all queries: (B, G, R, M, ...).

    The extent are the largest scores, (B, G, R, M, 1), and powers of two above the values, (B, G, 1, E); by default
    those of the keys at hand.
    """

    def finish_rows(rows: QueryRows, values: SlicedValues) -> Arrays:
        return finish(values, _sum_over_keys(rows, values))

    return for_each_rows(grid, finish_rows, stacks, functools.partial(_slice_values, grid, extent))


def _slice_values(grid: Grid, extent: tuple[Array, Array] | None, sample: Sample) -> SlicedValues:
    xp, count = grid.xp, grid.plan.num_slices
    values = to_float64(grid.value_part(sample.value), xp)
    if extent is None:
        row_max, power = None, power_above_max(values, -2, xp, grid.at_once)
    else:
        row_max, power = (grid.part_of(x, sample.index, sample.head) for x in extent)
    columns = slices.concat_slices(values, power, slices.VALUE_BITS[count], count, xp=xp)
    ones = xp.ones((*shape(values, xp=xp)[:-1], 1), dtype=xp.float64, **on_device_of(values))
    return SlicedValues(xp.concat([columns, ones], axis=-1), power, row_max)


def _sum_over_keys(rows: QueryRows, values: SlicedValues) -> Sums:
    grid, xp = rows.grid, rows.grid.xp
    if values.row_max is None and isinstance(grid.counts[1], int) and grid.counts[1] == 1:
        block = scores_at(rows, grid.may_mask, 0)  # one block of scores serves both passes
        anchor = anchor_max(xp.max(block.scores, axis=-1, keepdims=True), xp)
        return Sums(anchor, *_block_sums(rows, values, anchor, block, j=0))
    if values.row_max is None:
        row_max = max_scores(rows)
    else:
        row_max = grid.loops.block(values.row_max, rows.i, grid.sizes[0], -2)
    anchor = anchor_max(row_max, xp)

    def add_keys(masked: bool, j: Any, sums: Any) -> Any:
        new = _block_sums(rows, values, anchor, scores_at(rows, masked, j), j=j)
        return tuple(tuple(map(xp.add, *pair)) for pair in zip(sums, new, strict=True))

    return Sums(anchor, *rows.visit(add_keys, _zero_sums(rows, anchor)))


def _zero_sums(rows: QueryRows, like: Array) -> tuple[Parts, ...]:
    grid, xp, count = rows.grid, rows.grid.xp, rows.grid.plan.num_slices
    carry = slices.needs_carry(grid, 1)
    *dims, _ = shape(rows.query, xp=xp)
    widths = slices.value_widths(grid.width, count, carry), [1] * (slices.WEIGHT_SLICES[count] * (2 if carry else 1))
    return tuple(tuple(zeros_with(like, *dims, last, xp=xp) for last in lasts) for lasts in widths)


def _block_sums(
    rows: QueryRows, values: SlicedValues, anchor: Array, block: slices.ExactScoreBlock, *, j: Any
) -> tuple[Parts, ...]:
    """Sums over one block of keys: of weighted values, and of weights."""
    grid, xp = rows.grid, rows.grid.xp
    carry = slices.needs_carry(grid, 1)
    weights = slices.exact_weights(grid, block.scores, anchor)
    kept = weights if grid.dropout is None else [grid.drop(part, block.at) for part in weights]
    value_block = grid.loops.block(values.values, j, grid.sizes[1], -2)
    products = [matmul_per_group(part, value_block, xp) for part in kept]
    value_sums = tuple([product[..., :-1] for product in products])
    if grid.dropout is None:
        weight_sums = tuple([product[..., -1:] for product in products])
    else:
        weight_sums = tuple(xp.sum(part, axis=-1, keepdims=True) for part in weights)
    return slices.with_carry(value_sums, carry, xp), slices.with_carry(weight_sums, carry, xp)


# Averages


def weighted_totals(
    value_sums: Parts, weight_sums: Parts, value_power: Array, *, count: int, carry: bool, xp: Namespace
) -> tuple[Array, Array]:
    """Sums of weighted values and of weights, from the integers that stand for them, with so many slices of a value.

    The sum of each slice of the weights is rounded to float64, and these are added, the smallest first. Values have all
    of their bits in each, so nothing shows of the power that these were cut by.
    """
    bits = slices.WEIGHT_BITS[count]
    total, weight = (
        functools.reduce(lambda rest, part: xp.add(part, xp.multiply(rest, 2.0**-bits)), reversed(parts))
        for parts in (slices.join_value_sums(value_sums, count, carry, xp), weight_sums)
    )
    unit = xp.multiply(xp.expand_dims(value_power, axis=-3), 2.0 ** -(bits + slices.VALUE_BITS[count]))
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
    logsumexp = uncontracted(xp.multiply(exponent, 1 / slices.SCORE_UNIT), xp)
    return round_to_float32(xp.where(none, -math.inf, logsumexp), xp)
