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

from attention_core._arrays import Array, shape, zeros_with
from attention_core._attention.blocks.accumulators import concat_blocks
from attention_core._attention.blocks.grid import (
    Grid,
    batch_entry,
    cached_by_distance,
    dropout_of,
    is_one_block,
    make_grid,
    may_mask,
    num_heads_of,
    num_rounds,
)
from attention_core._attention.blocks.nonfinite import nan_unless_finite, with_nonfinite_values
from attention_core._attention.blocks.plan import Plan, is_unmodified_product, unpack_operands, with_value_facts
from attention_core._attention.blocks.query_chunks import attend_query_chunks, query_chunks
from attention_core._attention.blocks.scores import matmul_into_workspace, matmul_per_group, score_block
from attention_core._attention.blocks.visits import make_visits, visit_blocks
from attention_core._attention.call import apply_dropout, dropout_scale
from attention_core._attention.magnitudes import norms_are_bounded, scores_are_small
from attention_core._backend import Backend


def forward(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, Array]:
    """Output (B, G, R, M, E) and logsumexp (B, G, R, M)."""
    operands = unpack_operands(plan, arrays)
    plan = with_value_facts(plan, operands, backend)
    if plan.mask is not None and not backend.loops.traced:  # a mask is told apart finely, and blocks are joined to runs
        plan = plan._replace(block_sizes=(plan.block_sizes[0], min(plan.block_sizes)))

    def attend(plan: Plan) -> tuple[Array, Array]:
        tiles = make_grid(plan, arrays, backend)
        return with_nonfinite_values(
            tiles, functools.partial(_forward, tiles), lambda: empty_results(plan, arrays, backend)
        )

    if plan.exp_without_max is not None or backend.loops.softmax is None or not is_unmodified_product(plan, operands):
        return attend(plan)
    # Passes over scores cost so much here that the program looks when it runs.
    strips = query_chunks(plan, operands, backend)
    if strips:
        condition, quick = norms_are_bounded, lambda: attend_query_chunks(plan, operands, backend, strips)
    else:
        condition, quick = scores_are_small, lambda: attend(plan._replace(exp_without_max=True, all_finite=True))
    found: tuple[Array, Array] = backend.loops.cond(condition(*operands[:3], backend), quick, lambda: attend(plan))
    return found


def _forward(tiles: Grid, part: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Attention to a part of the values, which a function takes from those of an entry."""
    plan, xp, loops = tiles.plan, tiles.xp, tiles.loops
    dropout = dropout_of(tiles)
    visits = None if is_one_block(tiles) else make_visits(tiles, by_key=False, run_keys=plan.max_keys_per_run)
    query = tiles.operands.query
    _, groups, times, _, _ = shape(query, xp=xp)
    width = shape(tiles.operands.value, xp=xp)[-1]
    lowest = -float(xp.finfo(query.dtype).max)  # nothing is below, and nothing is subtracted from infinity

    def attend(index: Any, stacks: Any) -> Any:
        entry = batch_entry(tiles, index)
        to_scores = functools.partial(nan_unless_finite, tiles)
        queries = loops.split(entry.query, tiles.sizes[0], to_scores)
        keys, values = (
            loops.split(x, tiles.sizes[1], each) for x, each in ((entry.key, to_scores), (entry.value, part))
        )

        def attend_rows(i: Any, stacks: Any) -> Any:
            rows = loops.block_at(queries, i)
            if plan.exp_without_max:
                rows = xp.multiply(rows, loops.log_base)

            def absorb(masked: bool, j: Any, state: Any) -> Any:
                tile = score_block(tiles, entry, rows, xp.matrix_transpose(loops.block_at(keys, j)), i, j, masked)
                if plan.exp_without_max:
                    above, exponentials = None, loops.exp_scaled(tile.scores)
                else:
                    peak = xp.max(tile.scores, axis=-1, keepdims=True)
                    above = xp.maximum(peak, lowest if state is None else state[2])
                    exponentials = loops.exp_difference(tile.scores, above)
                total = xp.sum(exponentials, axis=-1, keepdims=True)
                kept = apply_dropout(exponentials, dropout, tile.at, num_heads_of(tiles), xp)
                columns = loops.block_at(values, j)
                summed = (
                    matmul_per_group(kept, columns, xp)
                    if state is None
                    else matmul_into_workspace(tiles, "summed", kept, columns)
                )
                alive = None
                if plan.may_mask:
                    alive = xp.ones_like(total, dtype=xp.bool)
                    if tile.allowed is not None:
                        allowed = tile.allowed
                        found = cached_by_distance(
                            tiles, "found", i, j, allowed, lambda: xp.any(allowed, axis=-1, keepdims=True)
                        )
                        alive = xp.logical_and(alive, found)
                if state is None:
                    return summed, total, above, alive
                before = state[:2]
                if above is not None:
                    fading = loops.exp_difference(state[2], above)
                    before = tuple(xp.multiply(x, fading) for x in before)
                return (
                    loops.inplace(xp.add, before[0], summed),
                    loops.inplace(xp.add, before[1], total),
                    above,
                    None if alive is None else xp.logical_or(state[3], alive),
                )

            def nothing() -> Any:
                *dims, _ = shape(rows, xp=xp)
                total = zeros_with(rows, *dims, 1, xp=xp)
                alive = xp.zeros_like(total, dtype=xp.bool) if plan.may_mask else None
                above = None if plan.exp_without_max else xp.full_like(total, lowest)
                return zeros_with(rows, *dims, width, xp=xp), total, above, alive

            if visits is None:
                state = absorb(may_mask(tiles), 0, None)
            else:
                next_block, whole, seen = visits.of(loops, entry.index, i)

                def absorb_next(masked: bool, step: Any, state: Any) -> Any:
                    return absorb(masked, next_block(step), state)

                state = visit_blocks(loops, whole, seen, absorb_next, nothing() if loops.traced else None)
            summed, total, top, alive = nothing() if state is None else state
            if alive is not None:
                total = xp.where(alive, total, 1.0)
            output = xp.divide(summed, total)
            logsumexp = xp.log(total) if top is None else xp.add(top, xp.log(total))
            if alive is not None:
                logsumexp = xp.where(alive, logsumexp, -math.inf)
            if dropout is not None:
                output = xp.multiply(output, dropout_scale(dropout))
            place = index * tiles.counts[0] + i
            return tuple(loops.add_block(stack, place, x) for stack, x in zip(stacks, (output, logsumexp), strict=True))

        return loops.loop(0, tiles.counts[0], attend_rows, stacks)

    def empty(last: Any) -> Any:
        dims = (groups, times, tiles.sizes[0], last)
        return loops.zero_blocks(num_rounds(tiles) * tiles.counts[0], lambda _: zeros_with(query, *dims, xp=xp))

    stacks = tuple(map(empty, (width, 1)))
    output, logsumexp = (concat_blocks(tiles, stack, 0) for stack in loops.loop(0, num_rounds(tiles), attend, stacks))
    return output, xp.squeeze(logsumexp, axis=-1)


def empty_results(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, Array]:
    """Arrays like those of `forward`, for compilers that ask for shapes alone."""
    xp, operands = backend.namespace, unpack_operands(plan, arrays)
    *dims, _ = shape(operands.query, xp=xp)
    width = shape(operands.value, xp=xp)[-1]
    return zeros_with(operands.query, *dims, width, xp=xp), zeros_with(operands.query, *dims, xp=xp)
