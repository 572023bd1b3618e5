"""The backward pass over blocks: the gradients of FlashAttention-2."""

from __future__ import annotations

import functools
import math
from typing import Any

from attention_core._arrays import Array, cast_to, is_floating, shape, upcast
from attention_core._attention.blocks.accumulators import (
    add_bias_gradient,
    bias_accumulator,
    concat_bias_gradient,
    concat_blocks,
    gradient_accumulators,
    matmul_transposed,
)
from attention_core._attention.blocks.grid import (
    Grid,
    batch_entry,
    dropout_of,
    entry_slice,
    make_grid,
    num_heads_of,
    num_rounds,
    pad,
)
from attention_core._attention.blocks.nonfinite import finite_or_zero, nan_unless_finite
from attention_core._attention.blocks.plan import Plan, unpack_operands, with_value_facts
from attention_core._attention.blocks.scores import (
    matmul_into_workspace,
    matmul_per_group,
    modified_scores,
    modifies_scores,
    score_block,
    score_variables,
)
from attention_core._attention.blocks.visits import make_visits, visit_blocks
from attention_core._attention.call import apply_dropout, dropout_scale
from attention_core._backend import Backend, is_concrete


def backward(
    plan: Plan,
    arrays: tuple[Array, ...],
    results: tuple[Array, Array],
    cotangents: tuple[Array, Array],
    backend: Backend,
) -> tuple[Array | None, ...]:
    """The gradient for each array, given those for output and logsumexp; ``None`` for integers and booleans."""
    plan = with_value_facts(plan, unpack_operands(plan, arrays), backend)
    plan = plan._replace(block_sizes=(plan.block_sizes[0], min(plan.block_sizes[1], plan.max_backward_keys)))
    tiles = make_grid(plan, arrays, backend)
    given, operands, xp, loops = unpack_operands(plan, arrays), tiles.operands, tiles.xp, tiles.loops
    delta = xp.expand_dims(xp.subtract(xp.vecdot(cotangents[0], results[0]), cotangents[1]), axis=-1)
    norm = xp.where(xp.equal(results[1], -math.inf), 0.0, results[1])
    norm = xp.expand_dims(norm, axis=-1)
    if loops.traced:
        spare = shape(operands.query, xp=xp)[-2] - tiles.lengths[0]
        cotangent, delta = (pad(x, -2, spare, xp) for x in (cotangents[0], delta))
        norm = pad(norm, -2, spare, xp, math.inf)  # rows that only fill up a block have no weights, whatever the scores
    else:
        cotangent = cotangents[0]
    sums = _backward(tiles, cotangent, delta, norm, backend)
    query, key, value = (concat_blocks(tiles, stack, side) for stack, side in zip(sums[:3], (0, 1, 1), strict=True))
    if not plan.all_finite:  # what was replaced has no gradient
        query, key, value = (
            xp.where(xp.isfinite(x), gradient, 0.0) for x, gradient in zip(given[:3], (query, key, value), strict=True)
        )
    bias = None if operands.bias is None else concat_bias_gradient(tiles, sums[3])
    variables = score_variables(tiles)
    changes = (cast_to(total, x.dtype, xp=xp) for total, x in zip(sums[4], variables, strict=len(sums[4]) > 0))
    softcap = None if operands.softcap is None else next(changes)
    gradients = (query, key, value, bias, softcap, None, None, None)
    own = (gradient for gradient, present in zip(gradients, plan.present, strict=True) if present)
    of_changes = (next(changes) if is_floating(array) else None for array in operands.score_mod)
    return *own, *(None for _ in operands.mask), *of_changes


def _backward(tiles: Grid, cotangent: Array, delta: Array, norm: Array, backend: Backend) -> Any:
    plan, xp, loops = tiles.plan, tiles.xp, tiles.loops
    dropout, visits = dropout_of(tiles), make_visits(tiles, by_key=True)
    row_counts, column_counts = tiles.counts
    calm = plan.all_finite and is_concrete(cotangent) and bool(xp.isfinite(xp.sum(xp.multiply(cotangent, cotangent))))
    depth, width = (shape(x, xp=xp)[-1] for x in (tiles.operands.key, tiles.operands.value))
    varied = tuple(xp.zeros_like(x) for x in upcast(score_variables(tiles), xp=xp)) if modifies_scores(tiles) else ()

    def attend(index: Any, sums: Any) -> Any:
        entry = batch_entry(tiles, index)
        b, g = entry.index, entry.head
        plain, to_scores = functools.partial(finite_or_zero, tiles), functools.partial(nan_unless_finite, tiles)
        queries = loops.split(entry.query, tiles.sizes[0], plain)
        changing = (
            plan.score_mod is not None and not plan.all_finite
        )  # it may make a number of nan, here as going forward
        scored_queries = loops.split(entry.query, tiles.sizes[0], to_scores) if changing else queries
        of_rows = tuple(loops.split(entry_slice(tiles, x, b, g), tiles.sizes[0]) for x in (cotangent, delta, norm))
        of_columns = tuple(loops.split(x, tiles.sizes[1], plain) for x in (entry.key, entry.value))
        scored_keys = loops.split(entry.key, tiles.sizes[1], to_scores) if changing else of_columns[0]

        def attend_columns(j: Any, sums: Any) -> Any:
            keys, values = (loops.block_at(x, j) for x in of_columns)
            keys_across, values_across = map(xp.matrix_transpose, (loops.block_at(scored_keys, j), values))
            next_block, whole, seen = visits.of(loops, entry.index, j)

            def absorb(masked: bool, step: Any, state: Any) -> Any:
                of_query, of_key, of_value, of_bias, of_changes = state
                i = next_block(step)
                rows, out, less, top = (loops.block_at(x, i) for x in (queries, *of_rows))
                scored_rows = loops.block_at(scored_queries, i) if changing else rows
                tile = score_block(tiles, entry, scored_rows, keys_across, i, j, masked)
                weights = loops.exp_difference(tile.scores, top)
                if tile.allowed is not None and not calm:
                    weights = xp.where(tile.allowed, weights, 0.0)  # even those of a query that is nan
                rise = matmul_into_workspace(tiles, "rise", out, values_across)
                kept = weights
                if dropout is not None:
                    kept, rise = (
                        xp.multiply(apply_dropout(x, dropout, tile.at, num_heads_of(tiles), xp), dropout_scale(dropout))
                        for x in (weights, rise)
                    )
                of_value = xp.add(of_value, matmul_transposed(kept, out, xp))
                slope = loops.inplace(xp.multiply, loops.inplace(xp.subtract, rise, less), weights)
                if tile.allowed is not None and not calm:  # so with every bias, whose gradient keeps this memory
                    slope = xp.where(tile.allowed, slope, 0.0)  # even if a masked value made it overflow
                if of_bias is not None:
                    of_bias = add_bias_gradient(tiles, entry, of_bias, slope, i, j)
                if modifies_scores(tiles):
                    _, pull = backend.vjp(
                        lambda raw, *variables: modified_scores(tiles, raw, variables, tile.at),
                        tile.raw,
                        *score_variables(tiles),
                    )
                    of_raw, *found = pull(slope)
                    slope = xp.where(xp.equal(slope, 0.0), 0.0, of_raw)  # even where the change has no finite slope
                    of_changes = tuple(map(xp.add, of_changes, upcast(tuple(found), xp=xp)))
                of_key = xp.add(of_key, matmul_transposed(slope, rows, xp))
                of_query = loops.add_block(of_query, index * row_counts + i, matmul_per_group(slope, keys, xp))
                return of_query, of_key, of_value, of_bias, of_changes

            stack, keys_sum, values_sum, of_bias, of_changes = sums
            state = (stack, xp.zeros_like(keys), xp.zeros_like(values), of_bias, of_changes)
            stack, of_key, of_value, of_bias, of_changes = visit_blocks(loops, whole, seen, absorb, state)
            place = index * column_counts + j
            return (
                stack,
                loops.add_block(keys_sum, place, of_key),
                loops.add_block(values_sum, place, of_value),
                of_bias,
                of_changes,
            )

        return loops.loop(0, column_counts, attend_columns, sums)

    return loops.loop(
        0,
        num_rounds(tiles),
        attend,
        (*gradient_accumulators(tiles, depth, depth, width, after=delta), bias_accumulator(tiles), varied),
    )
