"""The scores of attention in reproducible arithmetic, rounded once: a strip of queries at a time, against all keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attention_core._arithmetic.exact import round_to_float32, to_float64, uncontracted
from attention_core._arithmetic.products import exact_sum, matmul
from attention_core._arrays import Array, shape, zeros_with
from attention_core._attention.blocks.accumulators import concat_blocks
from attention_core._attention.blocks.grid import (
    Grid,
    batch_entry,
    entry_slice,
    is_broadcast,
    make_grid,
    may_mask,
    num_rounds,
    pad,
)
from attention_core._attention.blocks.nonfinite import finite_or_zero
from attention_core._attention.blocks.plan import Plan, unpack_operands
from attention_core._attention.blocks.visits import make_visits
from attention_core._attention.call import Call
from attention_core._attention.reproducible.forward import arrange
from attention_core._attention.reproducible.reduction import QueryRows, query_rows, row_accumulator, scores_at
from attention_core._attention.reproducible.slices import SCORE_UNIT
from attention_core._backend import Backend, Operation, register


def reproducible_scores(call: Call) -> Array:
    """Scores (..., H, M, N) in float32, masked with -inf.

    Raises
    ------
    ValueError
        When the number of keys is not known.
    """
    xp = call.xp
    *leading, heads, rows, _ = shape(call.query, xp=xp)
    columns = shape(call.key, xp=xp)[-2]
    if not isinstance(columns, int):
        raise ValueError("expected a known number of keys with arithmetic='reproducible'; got an unknown one")
    plan, arrays = arrange(call)
    (scores,) = call.backend.custom_gradient(SCORES, plan._replace(block_sizes=(plan.block_sizes[0], columns)), arrays)
    return xp.reshape(scores, (*leading, heads, rows, columns))


def _forward(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    tiles = make_grid(plan, arrays, backend)
    xp = tiles.xp

    def scores_of(strip: QueryRows) -> Array:
        return round_to_float32(
            uncontracted(xp.multiply(scores_at(strip, may_mask(tiles), 0).scores, 1 / SCORE_UNIT), xp), xp
        )

    return (_per_query_rows(tiles, scores_of, "float32"),)


def _per_query_rows(tiles: Grid, found: Callable[[QueryRows], Array], dtype: str) -> Array:
    loops, visits = tiles.loops, make_visits(tiles, by_key=False)

    def attend(index: Any, stack: Any) -> Any:
        strip_of = query_rows(tiles, visits, batch_entry(tiles, index))
        return loops.loop(
            0,
            tiles.counts[0],
            lambda i, stack: loops.add_block(stack, index * tiles.counts[0] + i, found(strip_of(i))),
            stack,
        )

    stack = row_accumulator(tiles, tiles.lengths[1], dtype)
    return concat_blocks(tiles, loops.loop(0, num_rounds(tiles), attend, stack), 0)


def _backward(
    plan: Plan,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array | None, ...]:
    tiles = make_grid(plan, arrays, backend)
    given, xp = unpack_operands(plan, arrays), tiles.xp
    slopes = to_float64(xp.where(xp.equal(results[0], -math.inf), 0.0, cotangents[0]), xp)
    of_bias = () if given.bias is None else (_d_bias(tiles, given.bias, slopes),)
    if plan.softcap is not None:
        spare = shape(tiles.operands.query, xp=xp)[-2] - tiles.lengths[0] if tiles.loops.traced else 0
        rising = pad(slopes, -2, spare, xp)

        def bent(strip: QueryRows) -> Array:
            own = entry_slice(tiles, rising, strip.entry.index, strip.entry.head)
            return xp.multiply(
                scores_at(strip, False, 0).slope, tiles.loops.block(own, strip.place, tiles.sizes[0], -2)
            )

        slopes = _per_query_rows(tiles, bent, "float64")
    scale = plan.score_scale
    query, key = (to_float64(finite_or_zero(tiles, x), xp) for x in given[:2])
    entries, groups, times, rows, columns = shape(slopes, xp=xp)
    by_group = xp.reshape(slopes, (entries, groups, times * rows, columns))
    of_query = xp.reshape(matmul(by_group, key, xp=xp), shape(query, xp=xp))
    queries = xp.reshape(query, (entries, groups, times * rows, shape(query, xp=xp)[-1]))
    of_key = matmul(xp.matrix_transpose(by_group), queries, xp=xp)
    of_query, of_key = (round_to_float32(uncontracted(xp.multiply(x, scale), xp), xp) for x in (of_query, of_key))
    if not plan.all_finite:  # what was replaced has no gradient
        of_query, of_key = (
            xp.where(xp.isfinite(x), gradient, 0.0) for x, gradient in zip(given[:2], (of_query, of_key), strict=True)
        )
    of_value = zeros_with(given.value, *shape(given.value, xp=xp), xp=xp)
    return of_query, of_key, of_value, *of_bias, *(None for _ in range(plan.num_integers))


def _d_bias(tiles: Grid, bias: Array, slopes: Array) -> Array:
    shared = tuple(axis for axis in range(5) if is_broadcast(bias, axis))
    return round_to_float32(exact_sum(slopes, shared, xp=tiles.xp) if shared else slopes, tiles.xp)


def _empty(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp, operands = backend.namespace, unpack_operands(plan, arrays)
    return (zeros_with(operands.query, *shape(operands.query, xp=xp)[:-1], shape(operands.key, xp=xp)[-2], xp=xp),)


SCORES = register("reproducible.scores", Operation(_forward, _backward, _empty, needs_float64=True))
