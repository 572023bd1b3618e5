r"""Attention over blocks of queries and keys, in memory that does not grow with M × N.

The weights of a block are computed, used and forgotten. Forward, a query's running maximum t, total z and sum u are
brought up to date by each block of keys,

.. math:: t' = \max(t, \max_j s_{ij}), \qquad z' = e^{t - t'} z + \sum_j e^{s_{ij} - t'}, \qquad
          u' = e^{t - t'} u + \sum_j e^{s_{ij} - t'} v_j,

and :math:`o_i = u / z`, :math:`\ell_i = t + \log z`. Where norms bound all scores by 32, t is 0, and nothing is
subtracted or fades. Backward, the weights are computed once more from :math:`\ell`, and with
:math:`\delta_i = \bar o_i \cdot o_i - \bar \ell_i`

.. math:: \bar v_j = \sum_i p_{ij} \bar o_i, \qquad \bar s_{ij} = p_{ij} (\bar o_i \cdot v_j - \delta_i), \qquad
          \bar q_i = \sum_j \bar s_{ij} k_j, \qquad \bar k_j = \sum_i \bar s_{ij} q_i,

where a bar marks a gradient, and q is scaled already.

References
----------
M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018. T. Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from attention_core._call import Call, default_scale, dropped, gain, widened
from attention_core._gradients import add_bias, bias_stack, collected_bias, gradient_stacks, transposed_product
from attention_core._namespace import beside, is_concrete, narrow, shape, wide_name, widen
from attention_core._plan import Plan, are_bounded, are_moderate, is_plain, looked_at, operands_of, planned
from attention_core._strips import attend_strips, strips_of
from attention_core._tiles import (
    Tiles,
    changed,
    collected,
    dropout_of,
    entry_of,
    finite,
    has_changes,
    heads_of,
    is_floating,
    is_one_block,
    may_mask,
    of_entry,
    once_for,
    pad,
    passing_product,
    product,
    rounds_of,
    scored,
    swept,
    tile_of,
    tiles_of,
    variables_of,
    visit,
    visits_of,
    zeros,
)
from attention_core._typing import Array
from attention_core.backend import Backend, Operation

__all__ = ["STREAMED", "backward", "blockwise", "blockwise_unless", "empty_results", "forward"]


def blockwise(call: Call, backend: Backend) -> tuple[Array, Array]:
    """Attention over blocks: output (..., H, M, E) and logsumexp (..., H, M), in the type of the computation."""
    xp, call = call.xp, widened(call)
    plan, operands = planned(call, backend)
    arrays = tuple(leaf for leaf in (*operands[:8], *operands.mask, *operands.score_mod) if leaf is not None)
    output, logsumexp = backend.custom_gradient(STREAMED, plan, arrays)
    *leading, heads, rows, _ = shape(call.query, xp=xp)
    width = shape(call.value, xp=xp)[-1]
    return xp.reshape(output, (*leading, heads, rows, width)), xp.reshape(logsumexp, (*leading, heads, rows))


def forward(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, Array]:
    """Output (B, G, R, M, E) and logsumexp (B, G, R, M)."""
    operands = operands_of(plan, arrays)
    plan = looked_at(plan, operands, backend)
    if plan.mask is not None and not backend.loops.traced:  # a mask is told apart finely, and blocks are joined to runs
        plan = plan._replace(blocks=(plan.blocks[0], min(plan.blocks)))

    def attend(plan: Plan) -> tuple[Array, Array]:
        tiles = tiles_of(plan, arrays, backend)
        return swept(tiles, functools.partial(_forward, tiles), lambda: empty_results(plan, arrays, backend))

    if plan.moderate is not None or backend.loops.softmax is None or not is_plain(plan, operands):
        return attend(plan)
    # Passes over scores cost so much here that the program looks when it runs.
    strips = strips_of(plan, operands, backend)
    if strips:
        condition, quick = are_bounded, lambda: attend_strips(plan, operands, backend, strips)
    else:
        condition, quick = are_moderate, lambda: attend(plan._replace(moderate=True, tame=True))
    found: tuple[Array, Array] = backend.loops.choose(condition(*operands[:3], backend), quick, lambda: attend(plan))
    return found


def _forward(tiles: Tiles, part: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Attention to a part of the values, which a function takes from those of an entry."""
    plan, xp, loops = tiles.plan, tiles.xp, tiles.loops
    dropout = dropout_of(tiles)
    visits = None if is_one_block(tiles) else visits_of(tiles, by_key=False, run_keys=plan.run_keys)
    query = tiles.operands.query
    _, groups, times, _, _ = shape(query, xp=xp)
    width = shape(tiles.operands.value, xp=xp)[-1]
    lowest = -float(xp.finfo(query.dtype).max)  # nothing is below, and nothing is subtracted from infinity

    def attend(index: Any, stacks: Any) -> Any:
        entry = entry_of(tiles, index)
        to_scores = functools.partial(scored, tiles)
        queries = loops.cut(entry.query, tiles.sizes[0], to_scores)
        keys, values = (loops.cut(x, tiles.sizes[1], each) for x, each in ((entry.key, to_scores), (entry.value, part)))

        def attend_rows(i: Any, stacks: Any) -> Any:
            rows = loops.item(queries, i)
            if plan.moderate:
                rows = xp.multiply(rows, loops.unit)

            def absorb(masked: bool, j: Any, state: Any) -> Any:
                tile = tile_of(tiles, entry, rows, xp.matrix_transpose(loops.item(keys, j)), i, j, masked)
                if plan.moderate:
                    above, exponentials = None, loops.powers(tile.scores)
                else:
                    peak = xp.max(tile.scores, axis=-1, keepdims=True)
                    above = xp.maximum(peak, lowest if state is None else state[2])
                    exponentials = loops.exp_difference(tile.scores, above)
                total = xp.sum(exponentials, axis=-1, keepdims=True)
                kept = dropped(exponentials, dropout, tile.at, heads_of(tiles), xp)
                columns = loops.item(values, j)
                summed = (
                    product(kept, columns, xp) if state is None else passing_product(tiles, "summed", kept, columns)
                )
                alive = None
                if plan.guarded:
                    alive = xp.ones_like(total, dtype=xp.bool)
                    if tile.allowed is not None:
                        allowed = tile.allowed
                        found = once_for(tiles, "found", i, j, allowed, lambda: xp.any(allowed, axis=-1, keepdims=True))
                        alive = xp.logical_and(alive, found)
                if state is None:
                    return summed, total, above, alive
                before = state[:2]
                if above is not None:
                    fading = loops.exp_difference(state[2], above)
                    before = tuple(xp.multiply(x, fading) for x in before)
                return (
                    loops.over(xp.add, before[0], summed),
                    loops.over(xp.add, before[1], total),
                    above,
                    None if alive is None else xp.logical_or(state[3], alive),
                )

            def nothing() -> Any:
                *dims, _ = shape(rows, xp=xp)
                total = zeros(rows, *dims, 1, xp=xp)
                alive = xp.zeros_like(total, dtype=xp.bool) if plan.guarded else None
                above = None if plan.moderate else xp.full_like(total, lowest)
                return zeros(rows, *dims, width, xp=xp), total, above, alive

            if visits is None:
                state = absorb(may_mask(tiles), 0, None)
            else:
                next_block, whole, seen = visits.of(loops, entry.index, i)

                def absorb_next(masked: bool, step: Any, state: Any) -> Any:
                    return absorb(masked, next_block(step), state)

                state = visit(loops, whole, seen, absorb_next, nothing() if loops.traced else None)
            summed, total, top, alive = nothing() if state is None else state
            if alive is not None:
                total = xp.where(alive, total, 1.0)
            output = xp.divide(summed, total)
            logsumexp = xp.log(total) if top is None else xp.add(top, xp.log(total))
            if alive is not None:
                logsumexp = xp.where(alive, logsumexp, -math.inf)
            if dropout is not None:
                output = xp.multiply(output, gain(dropout))
            place = index * tiles.counts[0] + i
            return tuple(loops.add(stack, place, x) for stack, x in zip(stacks, (output, logsumexp), strict=True))

        return loops.loop(0, tiles.counts[0], attend_rows, stacks)

    def empty(last: Any) -> Any:
        dims = (groups, times, tiles.sizes[0], last)
        return loops.stack(rounds_of(tiles) * tiles.counts[0], lambda _: zeros(query, *dims, xp=xp))

    stacks = tuple(map(empty, (width, 1)))
    output, logsumexp = (collected(tiles, stack, 0) for stack in loops.loop(0, rounds_of(tiles), attend, stacks))
    return output, xp.squeeze(logsumexp, axis=-1)


def empty_results(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, Array]:
    """Arrays like those of `forward`, for compilers that ask for shapes alone."""
    xp, operands = backend.namespace, operands_of(plan, arrays)
    *dims, _ = shape(operands.query, xp=xp)
    width = shape(operands.value, xp=xp)[-1]
    return zeros(operands.query, *dims, width, xp=xp), zeros(operands.query, *dims, xp=xp)


def backward(
    plan: Plan,
    arrays: tuple[Array, ...],
    results: tuple[Array, Array],
    cotangents: tuple[Array, Array],
    backend: Backend,
) -> tuple[Array | None, ...]:
    """The gradient for each array, given those for output and logsumexp; ``None`` for integers and booleans."""
    plan = looked_at(plan, operands_of(plan, arrays), backend)
    plan = plan._replace(blocks=(plan.blocks[0], min(plan.blocks[1], plan.backward_keys)))
    tiles = tiles_of(plan, arrays, backend)
    given, operands, xp, loops = operands_of(plan, arrays), tiles.operands, tiles.xp, tiles.loops
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
    query, key, value = (collected(tiles, stack, side) for stack, side in zip(sums[:3], (0, 1, 1), strict=True))
    if not plan.tame:  # what was replaced has no gradient
        query, key, value = (
            xp.where(xp.isfinite(x), gradient, 0.0) for x, gradient in zip(given[:3], (query, key, value), strict=True)
        )
    bias = None if operands.bias is None else collected_bias(tiles, sums[3])
    variables = variables_of(tiles)
    changes = (narrow(total, x.dtype, xp=xp) for total, x in zip(sums[4], variables, strict=len(sums[4]) > 0))
    softcap = None if operands.softcap is None else next(changes)
    gradients = (query, key, value, bias, softcap, None, None, None)
    own = (gradient for gradient, present in zip(gradients, plan.present, strict=True) if present)
    of_changes = (next(changes) if is_floating(array) else None for array in operands.score_mod)
    return *own, *(None for _ in operands.mask), *of_changes


def _backward(tiles: Tiles, cotangent: Array, delta: Array, norm: Array, backend: Backend) -> Any:
    plan, xp, loops = tiles.plan, tiles.xp, tiles.loops
    dropout, visits = dropout_of(tiles), visits_of(tiles, by_key=True)
    row_counts, column_counts = tiles.counts
    calm = plan.tame and is_concrete(cotangent) and bool(xp.isfinite(xp.sum(xp.multiply(cotangent, cotangent))))
    depth, width = (shape(x, xp=xp)[-1] for x in (tiles.operands.key, tiles.operands.value))
    varied = tuple(xp.zeros_like(x) for x in widen(variables_of(tiles), xp=xp)) if has_changes(tiles) else ()

    def attend(index: Any, sums: Any) -> Any:
        entry = entry_of(tiles, index)
        b, g = entry.index, entry.head
        plain, to_scores = functools.partial(finite, tiles), functools.partial(scored, tiles)
        queries = loops.cut(entry.query, tiles.sizes[0], plain)
        changing = plan.score_mod is not None and not plan.tame  # it may make a number of nan, here as going forward
        scored_queries = loops.cut(entry.query, tiles.sizes[0], to_scores) if changing else queries
        of_rows = tuple(loops.cut(of_entry(tiles, x, b, g), tiles.sizes[0]) for x in (cotangent, delta, norm))
        of_columns = tuple(loops.cut(x, tiles.sizes[1], plain) for x in (entry.key, entry.value))
        scored_keys = loops.cut(entry.key, tiles.sizes[1], to_scores) if changing else of_columns[0]

        def attend_columns(j: Any, sums: Any) -> Any:
            keys, values = (loops.item(x, j) for x in of_columns)
            keys_across, values_across = map(xp.matrix_transpose, (loops.item(scored_keys, j), values))
            next_block, whole, seen = visits.of(loops, entry.index, j)

            def absorb(masked: bool, step: Any, state: Any) -> Any:
                of_query, of_key, of_value, of_bias, of_changes = state
                i = next_block(step)
                rows, out, less, top = (loops.item(x, i) for x in (queries, *of_rows))
                scored_rows = loops.item(scored_queries, i) if changing else rows
                tile = tile_of(tiles, entry, scored_rows, keys_across, i, j, masked)
                weights = loops.exp_difference(tile.scores, top)
                if tile.allowed is not None and not calm:
                    weights = xp.where(tile.allowed, weights, 0.0)  # even those of a query that is nan
                rise = passing_product(tiles, "rise", out, values_across)
                kept = weights
                if dropout is not None:
                    kept, rise = (
                        xp.multiply(dropped(x, dropout, tile.at, heads_of(tiles), xp), gain(dropout))
                        for x in (weights, rise)
                    )
                of_value = xp.add(of_value, transposed_product(kept, out, xp))
                slope = loops.over(xp.multiply, loops.over(xp.subtract, rise, less), weights)
                if tile.allowed is not None and not calm:  # so with every bias, whose gradient keeps this memory
                    slope = xp.where(tile.allowed, slope, 0.0)  # even if a masked value made it overflow
                if of_bias is not None:
                    of_bias = add_bias(tiles, entry, of_bias, slope, i, j)
                if has_changes(tiles):
                    _, pull = backend.vjp(
                        lambda raw, *variables: changed(tiles, raw, variables, tile.at), tile.raw, *variables_of(tiles)
                    )
                    of_raw, *found = pull(slope)
                    slope = xp.where(xp.equal(slope, 0.0), 0.0, of_raw)  # even where the change has no finite slope
                    of_changes = tuple(map(xp.add, of_changes, widen(tuple(found), xp=xp)))
                of_key = xp.add(of_key, transposed_product(slope, rows, xp))
                of_query = loops.add(of_query, index * row_counts + i, product(slope, keys, xp))
                return of_query, of_key, of_value, of_bias, of_changes

            stack, keys_sum, values_sum, of_bias, of_changes = sums
            state = (stack, xp.zeros_like(keys), xp.zeros_like(values), of_bias, of_changes)
            stack, of_key, of_value, of_bias, of_changes = visit(loops, whole, seen, absorb, state)
            place = index * column_counts + j
            return (
                stack,
                loops.add(keys_sum, place, of_key),
                loops.add(values_sum, place, of_value),
                of_bias,
                of_changes,
            )

        return loops.loop(0, column_counts, attend_columns, sums)

    return loops.loop(
        0,
        rounds_of(tiles),
        attend,
        (*gradient_stacks(tiles, depth, depth, width, after=delta), bias_stack(tiles), varied),
    )


STREAMED = Operation(forward, backward, empty_results)


# What is computed only if it turns out to be needed


def blockwise_unless(spared: Array, call: Call, backend: Backend) -> Array:
    """The output of `blockwise`, in the type of the query, unless a 0-d array turns out true: then any numbers.

    Arrays are widened and scaled where that is needed only. The scale is a Python number.
    """
    plan, operands = planned(call, backend)
    operands = operands._replace(query=call.xp.reshape(call.query, shape(operands.query, xp=call.xp)))
    scale: Any = default_scale(call.query, call.xp) if call.scale is None else call.scale
    arrays = tuple(leaf for leaf in (*operands[:8], *operands.mask, *operands.score_mod) if leaf is not None)
    output, _ = backend.custom_gradient(SPARE, plan._replace(scale=float(scale)), (spared, *arrays))
    return narrow(call.xp.reshape(output, (*shape(call.query, xp=call.xp)[:-1], -1)), call.query.dtype, xp=call.xp)


def _is_spared(spared: Array) -> bool:
    return is_concrete(spared) and bool(spared)


def _wide(plan: Plan, arrays: tuple[Array, ...], xp: Any) -> tuple[Array, ...]:
    query, *others = widen(arrays, xp=xp)
    return xp.multiply(query, plan.scale), *others


def _spare_forward(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, Array]:
    spared, *others = arrays
    if _is_spared(spared):
        return _spare_results(plan, arrays, backend)
    return forward(plan, _wide(plan, tuple(others), backend.namespace), backend)


def _spare_results(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, Array]:
    xp, operands = backend.namespace, operands_of(plan, arrays[1:])
    *dims, _ = shape(operands.query, xp=xp)
    width = shape(operands.value, xp=xp)[-1]
    like = {"dtype": getattr(xp, wide_name(operands.query.dtype)), **beside(operands.query)}
    return xp.empty((*dims, width), **like), xp.empty(tuple(dims), **like)


def _spare_backward(
    plan: Plan,
    arrays: tuple[Array, ...],
    results: tuple[Array, Array],
    cotangents: tuple[Array, Array],
    backend: Backend,
) -> tuple[Array | None, ...]:
    xp, (spared, *others) = backend.namespace, arrays
    if _is_spared(spared):
        return None, *(xp.empty_like(array) if is_floating(array) else None for array in others)
    wide = _wide(plan, tuple(others), xp)
    query, *found = backward(plan, wide, results, cotangents, backend)
    gradients = (xp.multiply(query, plan.scale), *found)
    return None, *(
        None if gradient is None else narrow(gradient, array.dtype, xp=xp)
        for array, gradient in zip(others, gradients, strict=True)
    )


SPARE = Operation(_spare_forward, _spare_backward, _spare_results)
