"""Exact sums of weights and weighted values over all keys."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from attention_core._arithmetic.elementary import exp2_weight, log2
from attention_core._arithmetic.exact import divide_rows, power_above_max, round_to_float32, to_float64, uncontracted
from attention_core._arrays import Array, Namespace, on_device_of, shape, zeros_with
from attention_core._attention.blocks.accumulators import concat_blocks
from attention_core._attention.blocks.grid import (
    BatchEntry,
    Grid,
    batch_entry,
    dropout_of,
    entry_slice,
    may_mask,
    num_heads_of,
    num_rounds,
)
from attention_core._attention.blocks.scores import matmul_per_group
from attention_core._attention.blocks.visits import Visits, make_visits, visit_blocks
from attention_core._attention.call import apply_dropout
from attention_core._attention.reproducible.block import ExactScoreBlock, exact_score_block
from attention_core._attention.reproducible.slices import (
    MAX_TOP,
    MIN_TOP,
    SCORE_UNIT,
    VALUE_BITS,
    WEIGHT_BITS,
    Parts,
    combine_slices,
    concat_slices,
    needs_carry,
    slice_key,
    slice_query,
    slice_widths,
    sliced_matmul,
    weight_slices,
    with_carry,
)


class Reduction(NamedTuple):
    """What becomes of the sums of a block of queries, and of what they are taken.

    Attributes
    ----------
    close : callable
        ``close(top, power, sums, mass)`` returns arrays (G, R, m, ...) of some widths and one dtype.
    widths : tuple of int
    dtype : str
    part : callable
        A part of the values.
    given : (Array, Array) or None
        The largest scores, (B, G, R, M, 1), and the powers of two above the values, (B, G, 1, E), where these are not
        those of the keys at hand.
    """

    close: Any
    widths: tuple[Any, ...]
    dtype: str
    part: Any
    given: tuple[Array, Array] | None = None


class QueryRows(NamedTuple):
    """A block of queries in slices, and the keys that it visits."""

    tiles: Grid
    entry: BatchEntry
    query: Array
    keys: Array
    place: Any
    visits: tuple[Any, Any, Any]


def query_rows(tiles: Grid, visits: Visits, entry: BatchEntry) -> Any:
    """A function from blocks of queries of an entry to strips."""
    keys = slice_key(tiles, entry.key)

    def strip(i: Any) -> QueryRows:
        rows = slice_query(tiles, tiles.loops.block(entry.query, i, tiles.sizes[0], -2))
        return QueryRows(tiles, entry, rows, keys, i, visits.of(tiles.loops, entry.index, i))

    return strip


def scores_at(strip: QueryRows, masked: bool, j: Any) -> ExactScoreBlock:
    tiles = strip.tiles
    keys = tiles.loops.block(strip.keys, j, tiles.sizes[1], -2)
    return exact_score_block(tiles, strip.entry, strip.query, keys, strip.place, j, masked)


def max_scores(strip: QueryRows) -> Array:
    """The largest score of each query, (G, R, m, 1): -inf where there is none."""
    tiles, (next_block, whole, seen) = strip.tiles, strip.visits
    xp = tiles.xp

    def reach(masked: bool, step: Any, top: Array) -> Array:
        return xp.maximum(top, xp.max(scores_at(strip, masked, next_block(step)).scores, axis=-1, keepdims=True))

    *dims, _ = shape(strip.query, xp=xp)
    lowest = xp.full((*dims, 1), -math.inf, dtype=xp.float64, **on_device_of(strip.query))
    return visit_blocks(tiles.loops, whole, seen, reach, lowest)


def anchor_max(top: Array, xp: Namespace) -> Array:
    """What weights are relative to: 0 where all is masked, and nan beyond the largest float32."""
    size = xp.abs(top)
    top = xp.where(xp.logical_or(xp.equal(top, -math.inf), xp.less(size, MIN_TOP)), 0.0, top)
    return xp.where(xp.greater_equal(xp.abs(top), MAX_TOP), math.nan, top)


def reduce_keys(tiles: Grid, aim: Reduction) -> tuple[Array, ...]:
    """What ``aim.close`` makes of the sums of weighted values and of weights, over all keys, for all queries."""
    plan, xp, loops = tiles.plan, tiles.xp, tiles.loops
    count = plan.num_slices
    dropout = dropout_of(tiles)
    width = shape(tiles.operands.value, xp=xp)[-1]
    carry = needs_carry(tiles, 1)
    widths = slice_widths(width, count, carry), [1] * (count * (2 if carry else 1))
    visits = make_visits(tiles, by_key=False)
    once = aim.given is None and isinstance(tiles.counts[1], int) and tiles.counts[1] == 1

    def attend(index: Any, stacks: Any) -> Any:
        entry = batch_entry(tiles, index)
        strip_of = query_rows(tiles, visits, entry)
        values = aim.part(to_float64(entry.value, xp))
        if aim.given is None:
            tops, power = None, power_above_max(values, -2, xp)  # (G, 1, E)
        else:
            tops, power = (entry_slice(tiles, x, entry.index, entry.head) for x in aim.given)
        values = concat_slices(values, power, VALUE_BITS[count], count, xp)

        def attend_rows(i: Any, stacks: Any) -> Any:
            strip = strip_of(i)
            next_block, whole, seen = strip.visits
            *dims, _ = shape(strip.query, xp=xp)

            def sums_of(top: Array, tile: ExactScoreBlock, j: Any) -> tuple[Parts, Parts]:
                scores = tile.scores
                scores -= top
                weights = weight_slices(exp2_weight(scores, xp), WEIGHT_BITS[count], count, xp)
                mass = tuple(xp.sum(each, axis=-1, keepdims=True) for each in weights)
                kept = [apply_dropout(each, dropout, tile.at, num_heads_of(tiles), xp) for each in weights]
                found = sliced_matmul(kept, loops.block(values, j, tiles.sizes[1], -2), matmul_per_group, xp)
                return with_carry(found, carry, xp), with_carry(mass, carry, xp)

            def absorb(top: Array, masked: bool, step: Any, state: Any) -> Any:
                j = next_block(step)
                found = sums_of(top, scores_at(strip, masked, j), j)
                return tuple(tuple(map(xp.add, *each)) for each in zip(state, found, strict=True))

            if once:  # the scores of all keys are at hand for both passes
                tile = scores_at(strip, may_mask(tiles), 0)
                top = anchor_max(xp.max(tile.scores, axis=-1, keepdims=True), xp)
                sums, mass = sums_of(top, tile, 0)
            else:
                top = max_scores(strip) if tops is None else loops.block(tops, i, tiles.sizes[0], -2)
                top = anchor_max(top, xp)
                state = tuple(tuple(zeros_with(top, *dims, last, xp=xp) for last in lasts) for lasts in widths)
                sums, mass = visit_blocks(loops, whole, seen, functools.partial(absorb, top), state)
            place = index * tiles.counts[0] + i
            found = aim.close(top, power, sums, mass)
            return tuple(loops.add_block(stack, place, x) for stack, x in zip(stacks, found, strict=True))

        return loops.loop(0, tiles.counts[0], attend_rows, stacks)

    stacks = tuple(row_accumulator(tiles, last, aim.dtype) for last in aim.widths)
    return tuple(concat_blocks(tiles, stack, 0) for stack in loops.loop(0, num_rounds(tiles), attend, stacks))


def row_accumulator(tiles: Grid, last: Any, dtype: str) -> Any:
    """Blocks of rows for all queries."""
    xp, query = tiles.xp, tiles.operands.query
    _, groups, times, _, _ = shape(query, xp=xp)
    dims = (1 if tiles.plan.per_head else groups, times, tiles.sizes[0], last)
    count = num_rounds(tiles) * tiles.counts[0]
    return tiles.loops.zero_blocks(count, lambda _: xp.zeros(dims, dtype=getattr(xp, dtype), **on_device_of(query)))


def averaged(sums: Parts, mass: Parts, power: Array, xp: Namespace) -> tuple[Array, Array]:
    """Sums of weighted values and of weights, of the integers that stand for them."""
    count = len(mass)
    bits, value_bits = WEIGHT_BITS[count], VALUE_BITS[count]
    weight = mass[0]
    if count == 2:
        weight = xp.add(weight, xp.multiply(mass[1], 2.0**-bits))
    average = combine_slices(sums, bits, value_bits, xp)
    unit = xp.multiply(xp.expand_dims(power, axis=-3), 2.0 ** -(bits + value_bits))
    return xp.multiply(average, unit), xp.multiply(weight, 2.0**-bits)


def divide_by_weight(average: Array, weight: Array, factor: float, xp: Namespace) -> Array:
    """The output: 0 where there is no weight."""
    output = divide_rows(average, xp.where(xp.equal(weight, 0.0), 1.0, weight), xp)
    return round_to_float32(output if factor == 1 else xp.multiply(uncontracted(output, xp), factor), xp)


def logsumexp_of(top: Array, weight: Array, xp: Namespace) -> Array:
    """The logarithm of the sum of the exponentials of scores; -inf where there are none."""
    none = xp.equal(weight, 0.0)
    high = xp.add(top, xp.multiply(log2(xp.where(none, 1.0, weight), xp), 1 / 256))
    return round_to_float32(xp.where(none, -math.inf, uncontracted(xp.multiply(high, 1 / SCORE_UNIT), xp)), xp)
