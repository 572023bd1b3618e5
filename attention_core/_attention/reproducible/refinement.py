r"""Sums of small weights: as accurate as those of large ones, by as many slices as each of them needs.

The scale of an element of the output is :math:`S_{ie} = \sum_j w_{ij} |v_{je}|`, with weights relative to the largest
of the row. Two slices have errors relative to that one, and to the largest value of the channel. Let
:math:`U_{ie} = \sum_j |v_{je}|`, over the keys that query i may attend to. An element with a scale below
:math:`\tau U_{ie}` is summed again, and so is a sum of weights below :math:`\tau` times the number of these keys:

* The weights have a small *relative* error, by `exp2_tail`.
* They are cut into windows of 54 bits, three slices each, from the largest weight down. The values are cut into as many
  slices as they have bits.
* Windows are added until the scale of those so far is :math:`2^{34}` times what they may leave out.

Every comparison is one of exact sums of integers over the keys of a row. So row and channel alone decide whether an
element is summed again, and by how many windows: neither the block that it lies in, nor the elements next to it.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from attention_core._arithmetic.elementary import exp2_tail
from attention_core._arrays import Array, Namespace, on_device_of, shape, zeros_with
from attention_core._attention.blocks.grid import dropout_of, num_heads_of
from attention_core._attention.blocks.scores import matmul_per_group
from attention_core._attention.blocks.visits import visit_blocks
from attention_core._attention.call import apply_dropout
from attention_core._attention.reproducible.margins import CREDIT, LOG_TAU, PENALTY, STEP, doubtful
from attention_core._attention.reproducible.reduction import QueryRows, SlicedValues, Sums, scores_at
from attention_core._attention.reproducible.slices import (
    VALUE_BITS,
    WEIGHT_BITS,
    Parts,
    needs_carry,
    with_carry,
    without_carry,
)

BITS, SLICES = WEIGHT_BITS[2], 3
WINDOW = BITS * SLICES  # bits of the weights that are summed in one visit of all keys
WINDOWS = 7  # of weights from 1 down to the last bit of 2**-290
PAIR = 2 * VALUE_BITS[2]  # bits of the values that are summed in one visit
PAIRS = 7  # of values from the largest to the smallest float32
GUARD = 2.0**34  # the scale of an element over what its windows leave out, at least
PART = 8  # rows that a traced loop sums again together
SIZE_BITS = 22  # bits of half of a weight in the comparisons of sizes
NEAR, MOST = 4, 32  # rows in doubt that are no further apart are summed again together: few enough to stay in a cache


def refine(rows: QueryRows, values: SlicedValues, sums: Sums, total: Array, weight: Array) -> tuple[Array, Array]:
    """Sums of weighted values and of weights, with those that lost small weights summed again."""
    loops, xp = rows.grid.loops, rows.grid.xp
    in_doubt = doubtful(sums.margins[0], weight, values.factors, xp)
    if loops.traced:
        refine_parts = functools.partial(_refine_parts, rows, values, in_doubt, (sums.anchor, total, weight))
        return loops.cond(xp.any(in_doubt), refine_parts, lambda: (total, weight))  # type: ignore[no-any-return]
    flags = loops.to_list(xp.any(in_doubt, axis=(0, 1, 3)))
    pieces: list[tuple[Array, Array]] = []
    last = 0
    for start, stop in _runs(flags):
        before, run = slice(last, start), slice(start, stop)
        pieces.append((total[..., before, :], weight[..., before, :]))
        of_run = (x[..., run, :] for x in (sums.anchor, total, weight))
        pieces.append(_refine_rows(_rows_at(rows, start, stop), values, *of_run))
        last = stop
    if not pieces:
        return total, weight
    pieces.append((total[..., last:, :], weight[..., last:, :]))
    first, second = (xp.concat(list(parts), axis=-2) for parts in zip(*pieces, strict=True))
    return first, second


def _refine_parts(
    rows: QueryRows, values: SlicedValues, in_doubt: Array, arrays: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    """The same in a traced loop over parts of equal size; those without a row in doubt are left as they are."""
    grid, loops = rows.grid, rows.grid.loops
    size = next((size for size in range(PART, NEAR, -1) if grid.sizes[0] % size == 0), grid.sizes[0])
    count = grid.sizes[0] // size
    part_grid = grid._replace(sizes=(size, grid.sizes[1]), counts=(grid.counts[0] * count, grid.counts[1]))

    def add_part(index: Any, stacks: Any) -> Any:
        query, flags, *of_part = (loops.block(x, index, size, -2) for x in (rows.query, in_doubt, *arrays))
        part = rows._replace(grid=part_grid, query=query, i=rows.i * count + index)
        again = functools.partial(_refine_rows, part, values, *of_part)
        found = loops.cond(grid.xp.any(flags), again, lambda: tuple(of_part[1:]))
        return tuple(loops.add_block(stack, index, block) for stack, block in zip(stacks, found, strict=True))

    stacks = tuple(loops.zero_blocks(count, functools.partial(_zero_part, x, size, grid.xp)) for x in arrays[1:])
    stacks = loops.loop(0, count, add_part, stacks)
    total, weight = (loops.block_at(loops.stack_blocks(loops.concat_blocks(x, count, -2)), 0) for x in stacks)
    return total, weight


def _zero_part(x: Array, size: int, xp: Namespace, _: Any) -> Array:
    *dims, _, width = shape(x, xp=xp)
    return zeros_with(x, *dims, size, width, xp=xp)


def _runs(flags: list[bool]) -> list[tuple[int, int]]:
    """Where runs of rows in doubt start and stop, with up to a few other rows among them."""
    runs: list[tuple[int, int]] = []
    for row in (row for row, flag in enumerate(flags) if flag):
        near = runs and row - runs[-1][1] < NEAR and row - runs[-1][0] < MOST
        runs.append((runs.pop()[0] if near else row, row + 1))
    return runs


def _rows_at(rows: QueryRows, start: int, stop: int) -> QueryRows:
    """Some neighbouring queries of a block, as a run of blocks of one query each."""
    grid = rows.grid
    first = rows.i * grid.sizes[0]
    grid = grid._replace(sizes=(1, grid.sizes[1]), counts=(grid.lengths[0], grid.counts[1]), cache=None)
    return rows._replace(grid=grid, query=rows.query[..., start:stop, :], i=range(first + start, first + stop))


# Values, relative to the power of two above their channel


class _Columns(NamedTuple):
    """What weights are multiplied by, (G, N, ...)."""

    pair: Array  # two slices of the values side by side, (..., 2 E), the first one at the end
    coarse: Array  # the first bits of their magnitudes, (..., E)
    credit: Array  # an upper bound of these, and of what two slices of weight and value leave out
    num_pairs: Array  # how many pairs of slices hold all bits of all values, 0-d


def _columns(values: SlicedValues, traced: bool, xp: Namespace) -> _Columns:
    """The columns of a sample; where loops are not traced, computed once for all of its rows."""
    if "columns" in values.memo:
        return values.memo["columns"]  # type: ignore[no-any-return]
    width = shape(values.exact, xp=xp)[-1]
    coarse = xp.floor(xp.multiply(xp.abs(values.values[..., width:-1]), 1 / STEP))
    nonzero = xp.not_equal(values.exact, 0.0)
    credit = xp.where(nonzero, xp.add(coarse, float(CREDIT)), 0.0)
    num_pairs = xp.ones((), dtype=xp.int32, **on_device_of(coarse))
    if 0 in values.exact.shape:
        return _Columns(values.values[..., :-1], coarse, credit, num_pairs)
    smallest = xp.min(xp.where(nonzero, xp.abs(values.exact), math.inf), axis=-2, keepdims=True)
    smallest = xp.min(xp.divide(smallest, values.power))
    for n in range(1, PAIRS):  # the last bit of a float32 is 2**-23 of it
        deeper = xp.less(smallest, 2.0 ** (23 - PAIR * n))
        num_pairs = xp.add(num_pairs, xp.astype(deeper, xp.int32))
    columns = _Columns(values.values[..., :-1], coarse, credit, num_pairs)
    if not traced:
        values.memo["columns"] = columns
    return columns


def _slice_pair(values: SlicedValues, lift: Array, xp: Namespace) -> Array:
    """Two more slices of the values, behind those that a power of two brings in front of the point."""
    bits, x = VALUE_BITS[2], xp.multiply(xp.divide(values.exact, values.power), lift)
    whole, first, second = (xp.round(xp.multiply(x, 2.0 ** (bits * n))) for n in range(3))
    slices = (xp.subtract(less, xp.multiply(more, 2.0**bits)) for less, more in ((second, first), (first, whole)))
    return xp.concat(list(slices), axis=-1)


# Sums over one window of the weights


class _WindowSums(NamedTuple):
    """Sums over the keys, (G, R, m, ...), of half of each weight; the last column is that of the weights alone."""

    values: Array  # (..., E + 1), weighted values
    size: Array  # weighted magnitudes, by the first bits of both
    credit: Array  # the upper bounds of magnitudes, not weighted: what the keys would add with a weight of 1


class _Window(NamedTuple):
    """Which bits of the weights are summed."""

    rows: QueryRows
    values: SlicedValues
    anchor: Array
    columns: _Columns
    lift: Array  # the power of two that brings them in front of the point, 0-d


def _sum_window(window: _Window, inverse: Array) -> _WindowSums:
    """The sums over a window; ``inverse`` is that of its power of two."""
    xp, loops = window.rows.grid.xp, window.rows.grid.loops
    signed, weights, (size, credit) = _visit_keys(window, window.columns.pair)
    units = [2.0 ** (-BITS * n) for n in range(1, SLICES + 1)]
    one = xp.ones_like(window.lift)
    state = _combine_pair(signed, units, xp), one, one
    add_pair = functools.partial(_add_pair, window, units)
    values, _, _ = loops.loop(1, window.columns.num_pairs, add_pair, state)
    values = xp.concat([values, _add_slices(weights, units, xp)], axis=-1)
    size = xp.multiply(size, xp.multiply(inverse, 2.0**-SIZE_BITS))
    return _WindowSums(xp.multiply(values, inverse), size, credit)


def _add_pair(window: _Window, units: list[float], _: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
    """Add what the next two slices of the values contribute."""
    xp = window.rows.grid.xp
    values, lift, inverse = state
    lift, inverse = xp.multiply(lift, 2.0**PAIR), xp.multiply(inverse, 2.0**-PAIR)
    signed, _, _ = _visit_keys(window, _slice_pair(window.values, lift, xp))
    return xp.add(values, xp.multiply(_combine_pair(signed, units, xp), inverse)), lift, inverse


def _combine_pair(signed: Parts, units: list[float], xp: Namespace) -> Array:
    """The number that products with two slices of the values stand for."""
    width = shape(signed[0], xp=xp)[-1] // 2
    low, high = (
        _add_slices(tuple(part[..., n * width : (n + 1) * width] for part in signed), units, xp) for n in (0, 1)
    )
    bits = VALUE_BITS[2]
    return xp.add(xp.multiply(low, 2.0 ** (-2 * bits)), xp.multiply(high, 2.0**-bits))


def _add_slices(parts: Parts, units: list[float], xp: Namespace) -> Array:
    """The sum of integers in their units, the smallest first."""
    scaled = [xp.multiply(part, unit) for part, unit in zip(parts, units, strict=True)]
    return functools.reduce(xp.add, reversed(scaled))


def _visit_keys(window: _Window, pair: Array) -> tuple[Parts, ...]:
    """Exact sums over all keys, for each slice of the weights: of values, and of the weights alone; then sizes."""
    grid, xp = window.rows.grid, window.rows.grid.xp
    carry = needs_carry(grid, 1)
    next_block, whole, seen = window.rows.visits

    def add_keys(masked: bool, step: Any, sums: Any) -> Any:
        new = _block_sums(window, pair, masked, next_block(step))
        return tuple(tuple(map(xp.add, *parts)) for parts in zip(sums, new, strict=True))

    *dims, _ = shape(window.rows.query, xp=xp)
    width = shape(pair, xp=xp)[-1] // 2
    lasts = [2 * width] * (SLICES * (2 if carry else 1)), [1] * SLICES, [width + 1] * 2
    zeros = tuple(tuple(zeros_with(window.anchor, *dims, last, xp=xp) for last in each) for each in lasts)
    signed, *others = visit_blocks(grid.loops, whole, seen, add_keys, state=zeros)
    return without_carry(signed, carry, xp), *others


def _block_sums(window: _Window, pair: Array, masked: bool, j: Any) -> tuple[Parts, ...]:
    """The same over one block of keys."""
    grid, xp = window.rows.grid, window.rows.grid.xp
    block = scores_at(window.rows, masked, j)
    columns = (pair, window.columns.coarse, window.columns.credit)
    pair, coarse, credit = (grid.loops.block(x, j, grid.sizes[1], -2) for x in columns)
    weights = exp2_tail(xp.subtract(block.scores, window.anchor), xp)
    allowed = xp.ones_like(weights)
    if block.allowed is not None:
        allowed = xp.where(block.allowed, allowed, 0.0)
    weights *= xp.multiply(window.lift, 0.5)
    compared = xp.subtract(
        xp.floor(xp.multiply(weights, 2.0**SIZE_BITS)), xp.multiply(xp.floor(weights), 2.0**SIZE_BITS)
    )
    all_parts = *_weight_slices(weights, xp), compared, allowed
    *kept, kept_compared, counted = (
        apply_dropout(x, dropout_of(grid), block.at, num_heads_of(grid), xp=xp) for x in all_parts
    )
    *totals, compared_total, count = (xp.sum(x, axis=-1, keepdims=True) for x in all_parts)
    signed = tuple(matmul_per_group(part, pair, xp) for part in kept)
    sizes = (
        xp.concat([matmul_per_group(part, column, xp), total], axis=-1)
        for part, column, total in ((kept_compared, coarse, compared_total), (counted, credit, count))
    )
    return with_carry(signed, needs_carry(grid, 1), xp), tuple(totals), tuple(sizes)


def _weight_slices(x: Array, xp: Namespace) -> list[Array]:
    """The first bits after the point, as integers from 0 to below 2**18: all products and differences are exact.

    Works in the memory of ``x``, which is not used again.
    """
    slices, above = [], xp.floor(x)
    for _ in range(SLICES):
        x *= 2.0**BITS
        below = xp.floor(x)
        above *= -(2.0**BITS)
        above += below
        slices.append(above)
        above = below
    return slices


# Which elements are summed again, and by how many windows


class _Progress(NamedTuple):
    """What is known of each element after some windows, (G, R, m, E + 1) each."""

    values: Array
    size: Array
    open: Array  # whether the element needs more windows
    lift: Array  # 0-d, as in `_Window`
    inverse: Array


def _refine_rows(
    rows: QueryRows, values: SlicedValues, anchor: Array, total: Array, weight: Array
) -> tuple[Array, Array]:
    grid, xp = rows.grid, rows.grid.xp
    columns = _columns(values, grid.loops.traced, xp)
    one = xp.ones((), dtype=xp.float64, **on_device_of(anchor))
    window = _Window(rows, values, anchor, columns, lift=one)
    first = _sum_window(window, one)
    chosen = xp.logical_and(xp.less(first.size, _least_size(first, xp)), xp.greater(first.credit, 0.0))
    still_open = xp.logical_and(chosen, _is_short(first.size, first.credit, one, xp))
    progress = _Progress(first.values, first.size, still_open, lift=one, inverse=one)
    add_window = functools.partial(_add_window, window, first.credit)
    progress = _Progress(*grid.loops.loop(1, WINDOWS, add_window, tuple(progress)))
    unit = xp.multiply(xp.expand_dims(values.power, axis=-3), 2.0)
    total = xp.where(chosen[..., :-1], xp.multiply(progress.values[..., :-1], unit), total)
    return total, xp.where(chosen[..., -1:], xp.multiply(progress.values[..., -1:], 2.0), weight)


def _least_size(first: _WindowSums, xp: Namespace) -> Array:
    """The size of half of the weights from which on two slices of each are accurate."""
    least = xp.multiply(first.credit, 2.0 ** (LOG_TAU - 1))
    penalty = xp.multiply(first.size[..., -1:], float(PENALTY))
    return xp.concat([xp.add(least[..., :-1], penalty), least[..., -1:]], axis=-1)


def _is_short(size: Array, credit: Array, inverse: Array, xp: Namespace) -> Array:
    """Whether windows may leave out more than the guard allows."""
    return xp.less(size, xp.multiply(credit, xp.multiply(inverse, GUARD * 2.0**-WINDOW)))


def _add_window(window: _Window, credit: Array, _: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
    """Add the next window to the elements that need it, if there are any."""
    xp = window.rows.grid.xp
    values, size, still_open, lift, inverse = state
    lift, inverse = xp.multiply(lift, 2.0**WINDOW), xp.multiply(inverse, 2.0**-WINDOW)
    add = functools.partial(_add_sums, window._replace(lift=lift), inverse, _Progress(*state))
    values, size = window.rows.grid.loops.cond(xp.any(still_open), add, lambda: (values, size))
    still_open = xp.logical_and(still_open, _is_short(size, credit, inverse, xp))
    return values, size, still_open, lift, inverse


def _add_sums(window: _Window, inverse: Array, progress: _Progress) -> tuple[Array, Array]:
    xp, new = window.rows.grid.xp, _sum_window(window, inverse)
    values, size = (
        xp.where(progress.open, xp.add(before, more), before)
        for before, more in ((progress.values, new.values), (progress.size, new.size))
    )
    return values, size
