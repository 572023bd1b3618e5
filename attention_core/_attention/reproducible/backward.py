"""The backward pass in reproducible arithmetic."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attention_core._arithmetic.elementary import exp2_weight
from attention_core._arithmetic.exact import (
    join_carry,
    power_above,
    power_above_max,
    round_to_float32,
    split_carry,
    to_float64,
    uncontracted,
)
from attention_core._arithmetic.products import row_dots
from attention_core._arrays import Array, Namespace, shape, zeros_with
from attention_core._attention.blocks.accumulators import (
    add_bias_gradient,
    bias_accumulator,
    concat_bias_gradient,
    concat_blocks,
    gradient_accumulators,
    matmul_transposed,
)
from attention_core._attention.blocks.grid import (
    BatchEntry,
    Grid,
    batch_entry,
    dropout_of,
    entry_slice,
    is_broadcast,
    make_grid,
    num_heads_of,
    num_rounds,
    pad,
)
from attention_core._attention.blocks.nonfinite import finite_or_zero
from attention_core._attention.blocks.plan import Operands, Plan, unpack_operands
from attention_core._attention.blocks.scores import matmul_per_group
from attention_core._attention.blocks.visits import make_visits, visit_blocks
from attention_core._attention.call import apply_dropout, dropout_scale
from attention_core._attention.reproducible.block import exact_score_block
from attention_core._attention.reproducible.slices import (
    D_OUTPUT_BITS,
    D_SCORE_BITS,
    D_SCORE_FACTOR_BITS,
    WEIGHT_BITS,
    combine_slices,
    concat_slices,
    from_three_float32,
    needs_carry,
    pack_vectors,
    slice_key,
    slice_query,
    slice_widths,
    sliced_matmul,
    sliced_scores,
    split_columns,
    unsliced_scores,
    weight_slices,
    with_carry,
    without_carry,
)
from attention_core._backend import Backend

BIAS_BITS = 40
MAX_BACKWARD_BLOCK = 512  # of a block, going backward


class BackwardOperands(NamedTuple):
    """What going backward takes blocks of, beside the operands."""

    out: Array  # cotangents of the output, packed as queries are, (B, G, R, M, 2 E)
    out_columns: Array  # those times 2^-c, cut along columns, (B, G, R, M, 2 E)
    query_columns: Array  # queries times the bound of their slopes and 2^-c, (B, G, R, M, 2 D)
    rows: Array  # reference, delta, 1 / bound, and the unit of a bias, (B, G, R, M, 4)
    key_columns: Array  # (B, G, N, 2 D)


def backward(
    plan: Plan,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array | None, ...]:
    """The gradient for each array, given those for output and logsumexp; ``None`` for integers and booleans."""
    given, xp = unpack_operands(plan, arrays), backend.namespace
    tiles = make_grid(plan._replace(block_sizes=_square_blocks(plan, given, xp)), arrays, backend)
    operands = tiles.operands
    out, output, of_logsumexp, kept = (
        _pad_rows(tiles, to_float64(x, xp))
        for x in (cotangents[0], results[0], xp.expand_dims(cotangents[1], axis=-1), results[2])
    )
    query, key, value = (to_float64(finite_or_zero(tiles, x), xp) for x in operands[:3])
    delta = xp.subtract(row_dots(out, output, xp), of_logsumexp)
    width = shape(given.value, xp=xp)[-1]
    tallest = xp.expand_dims(xp.max(power_above_max(value, -1, xp), axis=-2, keepdims=True), axis=2)
    most = xp.multiply(
        xp.multiply(power_above_max(out, -1, xp), tallest), float(width * math.ceil(dropout_scale(dropout_of(tiles))))
    )
    bound = xp.multiply(power_above(xp.add(most, xp.abs(delta)), xp), 2.0)  # the product is one of powers of two
    share = kept[..., 3:]
    spread = xp.multiply(bound, share)
    reference = from_three_float32(kept[..., :3], xp)
    columns = (
        (xp.multiply(out, share), D_OUTPUT_BITS),
        (xp.multiply(query, spread), D_SCORE_FACTOR_BITS),
        (key, D_SCORE_FACTOR_BITS),
    )
    powers = [power_above_max(x, (-3, -2) if x is not key else -2, xp) for x, _ in columns]
    cut = [concat_slices(x, power, bits, 2, xp) for (x, bits), power in zip(columns, powers, strict=True)]
    widest = None if operands.bias is None else _max_shared_unit(tiles, spread)
    units = spread if widest is None else xp.multiply(xp.divide(spread, widest), 2.0**BIAS_BITS)
    rows = xp.concat([reference, delta, xp.divide(1.0, bound), units], axis=-1)
    sides = BackwardOperands(pack_vectors(tiles, out, first_last=False), cut[0], cut[1], rows, cut[2])
    packed = operands._replace(
        query=slice_query(tiles, operands.query),
        key=slice_key(tiles, operands.key),
        value=pack_vectors(tiles, value, first_last=True),
    )
    stacks = _backward(tiles._replace(operands=packed), sides)
    depth = shape(key, xp=xp)[-1]
    slices_of = (
        (D_SCORE_BITS, D_SCORE_FACTOR_BITS),
        (D_SCORE_BITS, D_SCORE_FACTOR_BITS),
        (WEIGHT_BITS[2], D_OUTPUT_BITS),
    )
    found = []
    for stack, side, last, cuts in zip(stacks[:3], (0, 1, 1), (depth, depth, width), slices_of, strict=True):
        carry = needs_carry(tiles, 1 - side)
        parts = split_columns(concat_blocks(tiles, stack, side), slice_widths(last, 2, carry))
        found.append(combine_slices(without_carry(parts, carry, xp), *cuts, xp))
    of_query, of_key, of_value = found
    scale = plan.score_scale
    spread = spread[..., : tiles.lengths[0], :]
    of_query = xp.multiply(of_query, xp.multiply(spread, xp.expand_dims(powers[2], axis=2)))
    of_key = xp.multiply(of_key, xp.squeeze(powers[1], axis=2))
    of_value = xp.multiply(of_value, xp.squeeze(powers[0], axis=2))
    slope_unit = scale * 2.0 ** -(D_SCORE_BITS + D_SCORE_FACTOR_BITS)
    units = slope_unit, slope_unit, dropout_scale(dropout_of(tiles)) * 2.0 ** -(WEIGHT_BITS[2] + D_OUTPUT_BITS)
    gradients: list[Any] = [
        round_to_float32(xp.multiply(gradient, unit), xp)
        for gradient, unit in zip((of_query, of_key, of_value), units, strict=True)
    ]
    if not plan.all_finite:  # what was replaced has no gradient
        gradients = [xp.where(xp.isfinite(x), gradient, 0.0) for x, gradient in zip(given[:3], gradients, strict=True)]
    if widest is not None:
        found = join_carry(tuple(concat_bias_gradient(tiles, stack) for stack in stacks[3]), xp)
        if not is_broadcast(operands.bias, -2):
            widest = widest[..., : tiles.lengths[0], :]
        gradients.append(round_to_float32(xp.multiply(found, xp.multiply(widest, 2.0**-BIAS_BITS)), xp))
    return *gradients, *(None for _ in range(plan.num_integers))


def _square_blocks(plan: Plan, operands: Operands, xp: Namespace) -> tuple[int, int]:
    """As many queries as keys, for both collect sums: with long blocks of one, those of the other come by often."""
    times = shape(operands.query, xp=xp)[2]
    side = min(MAX_BACKWARD_BLOCK, plan.block_sizes[1])
    return max(32, side // times if isinstance(times, int) else side), side


def _max_shared_unit(tiles: Grid, spread: Array) -> Array:
    """The largest unit of slopes among the rows that share an element of the bias, and no others."""
    xp, bias = tiles.xp, tiles.operands.bias
    shared = tuple(axis for axis in range(4) if is_broadcast(bias, axis))
    widest = xp.max(spread, axis=shared, keepdims=True) if shared else spread
    return xp.where(xp.equal(widest, 0.0), 1.0, widest)  # of rows that only fill up a block


def _pad_rows(tiles: Grid, rows: Array) -> Array:
    """Rows with zeros added, as the queries have where blocks are of one size."""
    if not tiles.loops.traced:
        return rows
    return pad(rows, -2, shape(tiles.operands.query, xp=tiles.xp)[-2] - tiles.lengths[0], tiles.xp)


def _backward(tiles: Grid, sides: BackwardOperands) -> Any:
    plan, xp, loops = tiles.plan, tiles.xp, tiles.loops
    count = plan.num_slices
    dropout, visits = dropout_of(tiles), make_visits(tiles, by_key=True)
    multiply_out = sliced_scores if count == 2 else unsliced_scores
    carry_keys, carry_rows = needs_carry(tiles, 1), needs_carry(tiles, 0)
    depth, width = (shape(x, xp=xp)[-1] // 2 for x in (sides.key_columns, sides.out_columns))
    widths = slice_widths(depth, 2, carry_keys), slice_widths(depth, 2, carry_rows), slice_widths(width, 2, carry_rows)

    def attend(index: Any, sums: Any) -> Any:
        entry = batch_entry(tiles, index)
        own = BackwardOperands(*(entry_slice(tiles, x, entry.index, entry.head) for x in sides))

        def attend_columns(j: Any, sums: Any) -> Any:
            keys, values, key_columns = (
                loops.block(x, j, tiles.sizes[1], -2) for x in (entry.key, entry.value, own.key_columns)
            )
            next_block, whole, seen = visits.of(loops, entry.index, j)

            def absorb(masked: bool, step: Any, state: Any) -> Any:
                of_query, of_key, of_value, of_bias = state
                i = next_block(step)
                query, out, out_columns, query_columns, rows = (
                    loops.block(x, i, tiles.sizes[0], -2) for x in (entry.query, *own[:4])
                )
                tile = exact_score_block(tiles, entry, query, keys, i, j, masked)
                scores = tile.scores
                scores -= rows[..., :1]
                weights = exp2_weight(scores, xp)
                rise = multiply_out(out, values, xp)
                if dropout is not None:
                    rise = apply_dropout(rise, dropout, tile.at, num_heads_of(tiles), xp)
                    rise = uncontracted(xp.multiply(rise, dropout_scale(dropout)), xp)
                slope = xp.subtract(rise, rows[..., 1:2])
                slope *= weights
                slope *= rows[..., 2:3]  # at most 1 in magnitude
                kept = [
                    apply_dropout(x, dropout, tile.at, num_heads_of(tiles), xp)
                    for x in weight_slices(weights, WEIGHT_BITS[2], 2, xp)
                ]
                if of_bias is not None:
                    of_bias = _add_bias_slices(tiles, entry, of_bias, slope, rows, i, j)
                if tile.slope is not None:
                    slope *= tile.slope
                parts = weight_slices(slope, D_SCORE_BITS, 2, xp)
                found = sliced_matmul(parts, query_columns, matmul_transposed, xp)
                of_key = tuple(map(xp.add, of_key, with_carry(found, carry_rows, xp)))
                found = sliced_matmul(kept, out_columns, matmul_transposed, xp)
                of_value = tuple(map(xp.add, of_value, with_carry(found, carry_rows, xp)))
                beside_keys = xp.concat(
                    list(with_carry(sliced_matmul(parts, key_columns, matmul_per_group, xp), carry_keys, xp)), axis=-1
                )
                return loops.add_block(of_query, index * tiles.counts[0] + i, beside_keys), of_key, of_value, of_bias

            stack, keys_sum, values_sum, of_bias = sums
            *dims, _ = shape(keys, xp=xp)
            empty = (tuple(zeros_with(keys, *dims, last, xp=xp) for last in lasts) for lasts in widths[1:])
            stack, *found, of_bias = visit_blocks(loops, whole, seen, absorb, (stack, *empty, of_bias))
            of_key, of_value = (xp.concat(list(parts), axis=-1) for parts in found)
            place = index * tiles.counts[1] + j
            return (
                stack,
                loops.add_block(keys_sum, place, of_key),
                loops.add_block(values_sum, place, of_value),
                of_bias,
            )

        return loops.loop(0, tiles.counts[1], attend_columns, sums)

    biases = None if tiles.operands.bias is None else (bias_accumulator(tiles), bias_accumulator(tiles))
    return loops.loop(
        0, num_rounds(tiles), attend, (*gradient_accumulators(tiles, *map(sum, widths), after=sides.rows), biases)
    )


def _add_bias_slices(
    tiles: Grid, entry: BatchEntry, stacks: Any, slope: Array, rows: Array, i: Any, j: Any
) -> tuple[Any, ...]:
    """Slopes as integers in a unit that all rows share, in two parts, so that their sums are exact."""
    parts = split_carry(tiles.xp.round(tiles.xp.multiply(slope, rows[..., 3:])), tiles.xp)
    return tuple(add_bias_gradient(tiles, entry, stack, part, i, j) for stack, part in zip(stacks, parts, strict=True))
