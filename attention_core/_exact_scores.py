"""The scores of attention in reproducible arithmetic, rounded once: a strip of queries at a time, against all keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attention_core._call import Call
from attention_core._exact import rounded, settle, wide
from attention_core._exact_attention import UNIT, Strip, arranged, row_stack, strips, tile_at
from attention_core._exact_layers import product, summed
from attention_core._namespace import shape
from attention_core._plan import Plan, operands_of
from attention_core._tiles import (
    Tiles,
    collected,
    entry_of,
    finite,
    is_one,
    may_mask,
    of_entry,
    pad,
    rounds_of,
    tiles_of,
    visits_of,
    zeros,
)
from attention_core._typing import Array
from attention_core.backend import Backend, Operation

__all__ = ["exact_scores"]


def exact_scores(call: Call, backend: Backend) -> Array:
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
    plan, arrays = arranged(call, backend)
    (scores,) = backend.custom_gradient(SCORES, plan._replace(blocks=(plan.blocks[0], columns)), arrays)
    return xp.reshape(scores, (*leading, heads, rows, columns))


def _forward(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    tiles = tiles_of(plan, arrays, backend)
    xp = tiles.xp

    def scores_of(strip: Strip) -> Array:
        return rounded(settle(xp.multiply(tile_at(strip, may_mask(tiles), 0).scores, 1 / UNIT), xp), xp)

    return (_strip_by_strip(tiles, scores_of, "float32"),)


def _strip_by_strip(tiles: Tiles, found: Callable[[Strip], Array], dtype: str) -> Array:
    loops, visits = tiles.loops, visits_of(tiles, by_key=False)

    def attend(index: Any, stack: Any) -> Any:
        strip_of = strips(tiles, visits, entry_of(tiles, index))
        return loops.loop(
            0,
            tiles.counts[0],
            lambda i, stack: loops.add(stack, index * tiles.counts[0] + i, found(strip_of(i))),
            stack,
        )

    stack = row_stack(tiles, tiles.lengths[1], dtype)
    return collected(tiles, loops.loop(0, rounds_of(tiles), attend, stack), 0)


def _backward(
    plan: Plan,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array | None, ...]:
    tiles = tiles_of(plan, arrays, backend)
    given, xp = operands_of(plan, arrays), tiles.xp
    slopes = wide(xp.where(xp.equal(results[0], -math.inf), 0.0, cotangents[0]), xp)
    of_bias = () if given.bias is None else (_of_bias(tiles, given.bias, slopes),)
    if plan.softcap is not None:
        spare = shape(tiles.operands.query, xp=xp)[-2] - tiles.lengths[0] if tiles.loops.traced else 0
        rising = pad(slopes, -2, spare, xp)

        def bent(strip: Strip) -> Array:
            own = of_entry(tiles, rising, strip.entry.index, strip.entry.head)
            return xp.multiply(tile_at(strip, False, 0).slope, tiles.loops.block(own, strip.place, tiles.sizes[0], -2))

        slopes = _strip_by_strip(tiles, bent, "float64")
    scale, _ = plan.exact  # type: ignore[misc]
    query, key = (wide(finite(tiles, x), xp) for x in given[:2])
    entries, groups, times, rows, columns = shape(slopes, xp=xp)
    by_group = xp.reshape(slopes, (entries, groups, times * rows, columns))
    of_query = xp.reshape(product(by_group, key, xp=xp), shape(query, xp=xp))
    queries = xp.reshape(query, (entries, groups, times * rows, shape(query, xp=xp)[-1]))
    of_key = product(xp.matrix_transpose(by_group), queries, xp=xp)
    of_query, of_key = (rounded(settle(xp.multiply(x, scale), xp), xp) for x in (of_query, of_key))
    if not plan.tame:  # what was replaced has no gradient
        of_query, of_key = (
            xp.where(xp.isfinite(x), gradient, 0.0) for x, gradient in zip(given[:2], (of_query, of_key), strict=True)
        )
    integers = sum(plan.present[4:]) + sum(plan.num_arrays)
    of_value = zeros(given.value, *shape(given.value, xp=xp), xp=xp)
    return of_query, of_key, of_value, *of_bias, *(None for _ in range(integers))


def _of_bias(tiles: Tiles, bias: Array, slopes: Array) -> Array:
    shared = tuple(axis for axis in range(5) if is_one(bias, axis))
    return rounded(summed(slopes, shared, xp=tiles.xp) if shared else slopes, tiles.xp)


def _empty(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp, operands = backend.namespace, operands_of(plan, arrays)
    return (zeros(operands.query, *shape(operands.query, xp=xp)[:-1], shape(operands.key, xp=xp)[-2], xp=xp),)


SCORES = Operation(_forward, _backward, _empty, wide=True)
