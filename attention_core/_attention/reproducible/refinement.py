r"""Sums of small weights: as accurate as those of large ones, by as many slices as each of them needs.

The scale of an element of the output is :math:`S_{ie} = \sum_j w_{ij} |v_{je}|`, with weights relative to the largest
of the row. Two slices have errors relative to that one, and to the largest value of the channel. Let
:math:`U_{ie} = \sum_j |v_{je}|`, over the keys that query i may attend to. An element with a scale below
:math:`\tau U_{ie}` is summed again, and so is a sum of weights below :math:`\tau` times the number of these keys:

* The weights have a small *relative* error, by `exp2_tail`.
* They are cut into windows of 54 bits, three slices each, from the largest weight down. The values are cut into as many
  slices as they have bits.
* Windows are added until the scale of those so far is :math:`2^{34}` times what they may leave out, or no weight of
  the row has further bits.

Every comparison is one of exact sums of integers over the keys of a row. So row and channel alone decide whether an
element is summed again, and by how many windows: neither the block that it lies in, nor the elements next to it.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from attention_core._arithmetic.elementary import exp2_tail
from attention_core._arithmetic.exact import sum_exactly, two_sum
from attention_core._arrays import Array, Namespace, on_device_of, shape, zeros_with
from attention_core._attention.blocks.grid import dropout_of, is_one_block, may_mask, num_heads_of
from attention_core._attention.blocks.scores import matmul_per_group
from attention_core._attention.blocks.visits import visit_blocks
from attention_core._attention.call import apply_dropout
from attention_core._attention.reproducible.block import ExactScoreBlock
from attention_core._attention.reproducible.margins import LEAST_CREDIT, LOG_TAU, WEIGHT_UNIT, doubtful
from attention_core._attention.reproducible.reduction import QueryRows, SlicedValues, Sums, scores_at
from attention_core._attention.reproducible.slices import (
    VALUE_BITS,
    WEIGHT_BITS,
    Parts,
    needs_carry,
    value_terms,
    with_carry,
)

BITS, SLICES = WEIGHT_BITS[2], 3
WINDOW = BITS * SLICES  # bits of the weights that are summed in one visit of all keys
WINDOWS = 7  # of weights from 1 down to the last bit of 2**-290
PAIR = 2 * VALUE_BITS[2]  # bits of the values that are summed in one visit
PAIRS = 7  # of values from the largest to the smallest float32
GUARD = 2.0**34  # the scale of an element over what its windows leave out, at least
PART = 8  # rows that a traced loop sums again together
SIZE_BITS = 17  # bits of half of a weight in the comparisons of sizes
MAGNITUDE = 2.0**17  # magnitudes times this are integers, of which 2**19 times weights can be added
NEAR, MOST = 4, 32  # rows in doubt that are no further apart are summed again together: few enough to stay in a cache


def refine(run: list[QueryRows], values: SlicedValues, sums: Sums, total: Array, weight: Array) -> tuple[Array, Array]:
    """Sums of weighted values and of weights, with those that lost small weights summed again."""
    loops, xp = run[0].grid.loops, run[0].grid.xp
    in_doubt = doubtful(sums.margins[0], values.least, xp)
    if loops.traced:
        refine_parts = functools.partial(_refine_parts, run[0], values, in_doubt, (sums.anchor, total, weight))
        return loops.cond(xp.any(in_doubt), refine_parts, lambda: (total, weight))  # type: ignore[no-any-return]
    flags = loops.to_list(xp.any(in_doubt, axis=(0, 1, 3)))
    pieces: list[tuple[Array, Array]] = []
    last = 0
    for first, rows in zip(range(0, len(flags), run[0].grid.sizes[0]), run, strict=True):
        for start, stop in _runs(flags[first : first + run[0].grid.sizes[0]]):
            before, here = slice(last, first + start), slice(first + start, first + stop)
            pieces.append((total[..., before, :], weight[..., before, :]))
            of_run = (x[..., here, :] for x in (sums.anchor, total, weight))
            pieces.append(_refine_rows(_rows_at(rows, start, stop), values, *of_run))
            last = first + stop
    if not pieces:
        return total, weight
    pieces.append((total[..., last:, :], weight[..., last:, :]))
    first_part, second_part = (xp.concat(list(parts), axis=-2) for parts in zip(*pieces, strict=True))
    return first_part, second_part


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
    """What weights are multiplied by, (G, N, E), and how many slices the values need."""

    coarse: Array  # the first bits of the magnitudes of values
    credit: Array  # the same, and a least number for values that count as 0 there
    num_pairs: Array  # how many pairs of slices hold all bits of all values, 0-d


def _columns(values: SlicedValues, traced: bool, xp: Namespace) -> _Columns:
    """The columns of a sample; where loops are not traced, computed once for all of its rows."""
    if "columns" in values.memo:
        return values.memo["columns"]  # type: ignore[no-any-return]
    assert values.magnitudes is not None
    coarse = xp.multiply(xp.astype(values.magnitudes[..., :-1], xp.float64), WEIGHT_UNIT * MAGNITUDE)
    nonzero = xp.not_equal(values.exact, 0.0)
    credit = xp.where(nonzero, xp.where(xp.equal(coarse, 0.0), LEAST_CREDIT * MAGNITUDE, coarse), 0.0)
    num_pairs = xp.ones((), dtype=xp.int32, **on_device_of(coarse))
    if 0 in values.exact.shape:
        return _Columns(coarse, credit, num_pairs)
    smallest = xp.min(xp.where(nonzero, xp.abs(values.exact), math.inf), axis=-2, keepdims=True)
    smallest = xp.min(xp.divide(smallest, values.power))
    for n in range(1, PAIRS):  # the last bit of a float32 is 2**-23 of it
        deeper = xp.less(smallest, 2.0 ** (23 - PAIR * n))
        num_pairs = xp.add(num_pairs, xp.astype(deeper, xp.int32))
    columns = _Columns(coarse, credit, num_pairs)
    if not traced:
        values.memo["columns"] = columns
    return columns


def _slice_pair(values: SlicedValues, lift: Array, xp: Namespace) -> Array:
    """Two slices of the values, (G, N, 2 E), behind those that a power of two brings in front of the point."""
    bits, x = VALUE_BITS[2], xp.multiply(xp.divide(values.exact, values.power), lift)
    whole, first, second = (xp.round(xp.multiply(x, 2.0 ** (bits * n))) for n in range(3))
    whole = xp.where(xp.equal(lift, 1.0), 0.0, whole)  # nothing lies before the first pair, which may round up
    slices = (xp.subtract(less, xp.multiply(more, 2.0**bits)) for less, more in ((second, first), (first, whole)))
    return xp.concat(list(slices), axis=-1)


# Sums over all keys


class _Again(NamedTuple):
    """Queries that are summed again."""

    rows: QueryRows
    values: SlicedValues
    anchor: Array
    columns: _Columns

    def weights(self, masked: bool, j: Any, lift: Array) -> tuple[Array, ExactScoreBlock]:
        """Half of the weights of a block of keys, times a power of two, and the block."""
        xp, block = self.rows.grid.xp, scores_at(self.rows, masked, j)
        weights = exp2_tail(xp.subtract(block.scores, self.anchor), xp)
        weights *= xp.multiply(lift, 0.5)
        return weights, block

    def visit(self, add_keys: Any, widths: tuple[list[Any], ...]) -> tuple[Parts, ...]:
        """Exact sums over all keys of ``add_keys(masked, j)``, arrays of these widths."""
        grid, xp = self.rows.grid, self.rows.grid.xp
        if is_one_block(grid):
            return add_keys(may_mask(grid), 0)  # type: ignore[no-any-return]
        next_block, whole, seen = self.rows.visits
        if grid.loops.traced and seen is not whole:
            whole = 0  # one loop instead of two: a smaller program, most of which rarely runs

        def absorb(masked: bool, step: Any, sums: Any) -> Any:
            new = add_keys(masked, next_block(step))
            return tuple(tuple(map(xp.add, *parts)) for parts in zip(sums, new, strict=True))

        *dims, _ = shape(self.rows.query, xp=xp)
        zeros = tuple(tuple(zeros_with(self.anchor, *dims, last, xp=xp) for last in each) for each in widths)
        return visit_blocks(grid.loops, whole, seen, absorb, state=zeros)  # type: ignore[no-any-return]


def _sizes(again: _Again, weights: Array, block: ExactScoreBlock, column: Array, *, j: Any) -> Array:
    """Sums over a block of weights times a column, (G, R, m, E + 1); the last one is that of the weights alone."""
    grid, xp = again.rows.grid, again.rows.grid.xp
    kept = apply_dropout(weights, dropout_of(grid), block.at, num_heads_of(grid), xp=xp)
    products = matmul_per_group(kept, grid.loops.block(column, j, grid.sizes[1], -2), xp)
    return xp.concat([products, xp.sum(weights, axis=-1, keepdims=True)], axis=-1)


def _compared(weights: Array, xp: Namespace) -> Array:
    """The first bits of weights behind the point, as integers."""
    in_front = xp.multiply(xp.floor(weights), 2.0**SIZE_BITS)
    return xp.subtract(xp.floor(xp.multiply(weights, 2.0**SIZE_BITS)), in_front)


def _size_and_credit(again: _Again) -> tuple[Array, Array]:
    """The sizes of all elements by the first bits of half of each weight, and by a weight of 1 for each key."""
    grid, xp, (coarse, credit, _) = again.rows.grid, again.rows.grid.xp, again.columns
    one = xp.ones((), dtype=xp.float64, **on_device_of(again.anchor))

    def add_keys(masked: bool, j: Any) -> tuple[Parts, ...]:
        weights, block = again.weights(masked, j, one)
        allowed = xp.ones_like(weights)
        if block.allowed is not None:
            allowed = xp.where(block.allowed, allowed, 0.0)
        pairs = (_compared(weights, xp), coarse), (allowed, credit)
        return (tuple(_sizes(again, part, block, column, j=j) for part, column in pairs),)

    width = shape(grid.operands.value, xp=xp)[-1]
    ((size, most),) = again.visit(add_keys, ([width + 1] * 2,))
    return xp.multiply(size, 2.0**-SIZE_BITS), most


# Sums over one window of the weights


def _sum_window(again: _Again, lift: Array, inverse: Array) -> tuple[Array, Array, Array, Array]:
    """Sums of half of each weight over a window, by the power of two that brings it in front of the point.

    Of weighted values, what their roundings left out, and their sizes, each (G, R, m, E + 1), with the weights alone at
    the end. Then how many weights of a row have bits behind the window, (G, R, m, 1).
    """
    xp, query = again.rows.grid.xp, again.rows.query
    width = shape(again.values.exact, xp=xp)[-1]
    *dims, _ = shape(query, xp=xp)
    zeros = tuple(zeros_with(again.anchor, *dims, last, xp=xp) for last in (width, width, 1, width + 1, 1))
    one = xp.ones_like(lift)
    add_pair = functools.partial(_add_pair, again, lift)
    state = again.rows.grid.loops.loop(0, again.columns.num_pairs, add_pair, (*zeros, one, one))
    values, error, weight, size, longer, *_ = state
    sums, errors = (
        xp.multiply(xp.concat(list(pair), axis=-1), inverse)
        for pair in ((values, weight), (error, xp.zeros_like(weight)))
    )
    return sums, errors, xp.multiply(size, xp.multiply(inverse, 2.0**-SIZE_BITS)), longer


def _add_pair(again: _Again, lift: Array, _: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
    """Add what two slices of the values contribute; weights and sizes are the same for each pair."""
    grid, xp = again.rows.grid, again.rows.grid.xp
    values, error, *_, value_lift, value_inverse = state
    carry, width = needs_carry(grid, 1), shape(again.values.exact, xp=xp)[-1]
    pair = _slice_pair(again.values, value_lift, xp)
    add_keys = functools.partial(_window_sums, again, lift, pair)
    widths = [2 * width] * (SLICES * (2 if carry else 1)), [1] * SLICES, [width + 1, 1]
    signed, weights, (size, longer) = again.visit(add_keys, widths)
    units = [2.0 ** (-BITS * n) for n in range(1, SLICES + 1)]
    unit = xp.multiply(value_inverse, 2.0 ** -(BITS + VALUE_BITS[2]))
    terms = (xp.multiply(term, unit) for term in value_terms(signed, 2, carry, xp))
    values, left_out = sum_exactly((values, *terms), xp)
    lifts = xp.multiply(value_lift, 2.0**PAIR), xp.multiply(value_inverse, 2.0**-PAIR)
    return values, xp.add(error, left_out), _add_slices(weights, units, xp), size, longer, *lifts


def _window_sums(again: _Again, lift: Array, pair: Array, masked: bool, j: Any) -> tuple[Parts, ...]:
    """Over a block of keys, by slices of the weights: of values, and of weights alone; then sizes, and longer ones."""
    grid, xp = again.rows.grid, again.rows.grid.xp
    weights, block = again.weights(masked, j, lift)
    size = _sizes(again, _compared(weights, xp), block, again.columns.coarse, j=j)
    *slices, rest = _weight_slices(weights, xp)
    longer = xp.sum(xp.astype(xp.greater(rest, 0.0), xp.float64), axis=-1, keepdims=True)
    totals = tuple(xp.sum(part, axis=-1, keepdims=True) for part in slices)
    kept = [apply_dropout(part, dropout_of(grid), block.at, num_heads_of(grid), xp=xp) for part in slices]
    products = matmul_per_group(xp.concat(kept, axis=-2), grid.loops.block(pair, j, grid.sizes[1], -2), xp)
    count = shape(weights, xp=xp)[-2]
    signed = tuple(products[..., n * count : (n + 1) * count, :] for n in range(SLICES))
    return with_carry(signed, needs_carry(grid, 1), xp), totals, (size, longer)


def _add_slices(parts: Parts, units: list[float], xp: Namespace) -> Array:
    """The sum of integers in their units, the smallest first."""
    scaled = [xp.multiply(part, unit) for part, unit in zip(parts, units, strict=True)]
    return functools.reduce(xp.add, reversed(scaled))


def _weight_slices(x: Array, xp: Namespace) -> list[Array]:
    """The first bits after the point, as integers from 0 to below 2**18; then the rest. All steps are exact.

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
    x -= above
    return [*slices, x]


# Which elements are summed again, and by how many windows


class _Progress(NamedTuple):
    """What is known of each element after some windows, (G, R, m, E + 1) each."""

    values: Array
    error: Array  # what roundings left out of the values
    size: Array
    longer: Array  # how many weights of a row have bits behind these windows, (G, R, m, 1)
    open: Array  # whether the element needs more windows
    lift: Array  # 0-d, the power of two that brings the next window in front of the point
    inverse: Array


def _refine_rows(
    rows: QueryRows, values: SlicedValues, anchor: Array, total: Array, weight: Array
) -> tuple[Array, Array]:
    xp, loops = rows.grid.xp, rows.grid.loops
    again = _Again(rows, values, anchor, _columns(values, loops.traced, xp))
    size, credit = _size_and_credit(again)
    # From this size of half of the weights on, two slices of each are accurate.
    chosen = xp.logical_and(xp.less(size, xp.multiply(credit, 2.0 ** (LOG_TAU - 1))), xp.greater(credit, 0.0))
    add_windows = functools.partial(_add_windows, again, chosen, credit, (total, weight))
    return loops.cond(xp.any(chosen), add_windows, lambda: (total, weight))  # type: ignore[no-any-return]


def _add_windows(again: _Again, chosen: Array, credit: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
    """The sums, of which those that are chosen are replaced by those of as many windows as they need."""
    xp = again.rows.grid.xp
    zeros = xp.zeros_like(credit)
    one = xp.ones((), dtype=xp.float64, **on_device_of(credit))
    progress = _Progress(zeros, zeros, zeros, zeros[..., :1], chosen, lift=one, inverse=one)
    add_window = functools.partial(_add_window, again, credit)
    found, error, *_ = again.rows.grid.loops.loop(0, WINDOWS, add_window, tuple(progress))
    found = xp.add(found, error)
    unit = xp.multiply(xp.expand_dims(again.values.power, axis=-3), 2.0)
    total = xp.where(chosen[..., :-1], xp.multiply(found[..., :-1], unit), sums[0])
    return total, xp.where(chosen[..., -1:], xp.multiply(found[..., -1:], 2.0), sums[1])


def _add_window(again: _Again, credit: Array, _: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
    """Add the next window to the elements that need it, if there are any."""
    xp, progress = again.rows.grid.xp, _Progress(*state)
    add = functools.partial(_add_sums, again, progress)
    sums = again.rows.grid.loops.cond(xp.any(progress.open), add, lambda: tuple(progress[:4]))
    *_, size, longer = sums
    short = xp.less(size, xp.multiply(credit, xp.multiply(progress.inverse, GUARD * 2.0**-WINDOW)))
    lifts = xp.multiply(progress.lift, 2.0**WINDOW), xp.multiply(progress.inverse, 2.0**-WINDOW)
    still_open = xp.logical_and(progress.open, xp.logical_and(short, xp.greater(longer, 0.0)))
    return *sums, still_open, *lifts


def _add_sums(again: _Again, progress: _Progress) -> tuple[Array, Array, Array, Array]:
    xp = again.rows.grid.xp
    new_values, new_error, new_size, longer = _sum_window(again, progress.lift, progress.inverse)
    values, left_out = two_sum(progress.values, new_values, xp)
    error = xp.add(progress.error, xp.add(new_error, left_out))
    size = xp.add(progress.size, new_size)
    values, error, size = (
        xp.where(progress.open, more, before) for before, more in zip(progress[:3], (values, error, size), strict=True)
    )
    return values, error, size, longer
