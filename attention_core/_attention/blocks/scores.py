"""The scores of one block: product, softcap, score modification, bias and mask."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from attention_core._arrays import Array, Namespace, is_floating, shape
from attention_core._attention.blocks.grid import (
    BatchEntry,
    Grid,
    arange_like,
    block_positions,
    cached_by_distance,
    is_broadcast,
)
from attention_core._attention.scores import masked_scores, modify_scores
from attention_core.masks import Positions, unflatten


class ScoreBlock(NamedTuple):
    """A block of queries against a block of keys."""

    raw: Array  # scores before anything is changed, (G, R, m, n)
    scores: Array  # with -inf where nothing is allowed
    allowed: Array | None
    at: Positions | None


def score_block(tiles: Grid, entry: BatchEntry, query: Array, key: Array, i: Any, j: Any, masked: bool) -> ScoreBlock:
    plan, xp = tiles.plan, tiles.xp
    raw = matmul_into_workspace(tiles, "scores", query, key)
    at, bias, allowed = block_context(tiles, entry, raw, i, j, masked)
    modify: Any = None
    if modifies_scores(tiles):
        raw = raw if allowed is None else xp.where(allowed, raw, 0.0)
        modify = functools.partial(modified_scores, tiles, variables=score_variables(tiles), at=at)
    mask: Any = None
    if allowed is not None and plan.all_finite and plan.score_mod is None:  # which may make NaN of what is masked
        limit = cached_by_distance(tiles, "limit", i, j, allowed, lambda: mask_limit(allowed, raw, xp))
        mask = functools.partial(_minimum, tiles, limit)
    return ScoreBlock(raw, masked_scores(raw, allowed, bias, modify, mask=mask, xp=xp), allowed, at)


def _minimum(tiles: Grid, limit: Array, scores: Array) -> Array:
    """The lower of scores and a limit, in the memory of the scores."""
    return tiles.loops.inplace(tiles.xp.minimum, scores, limit)


def block_context(
    tiles: Grid, entry: BatchEntry, raw: Array, i: Any, j: Any, masked: bool
) -> tuple[Positions | None, Array | None, Array | None]:
    """Of a block of scores: where they stand if anything asks for that, their bias, and where they are allowed."""
    plan = tiles.plan
    at = block_positions(tiles, entry, i, j, raw) if plan.score_mod is not None or plan.dropout_rate else None
    bias = entry.bias
    if bias is not None:
        for axis, place in ((-2, i), (-1, j)):
            bias = bias if is_broadcast(bias, axis) else tiles.loops.block(bias, place, tiles.sizes[axis], axis)
    if not masked:
        return at, bias, None
    return (
        at,
        bias,
        cached_by_distance(tiles, "allowed", i, j, raw, lambda: _allowed_in_block(tiles, entry, bias, i, j, at, raw)),
    )


def _allowed_in_block(
    tiles: Grid, entry: BatchEntry, bias: Array | None, i: Any, j: Any, at: Positions | None, raw: Array
) -> Array:
    xp = tiles.xp
    admitted = []
    if entry.rule is not None:
        admitted.append(entry.rule.allowed(block_positions(tiles, entry, i, j, raw) if at is None else at, xp=xp))
    if bias is not None:
        admitted.append(xp.not_equal(bias, -math.inf))
    if tiles.padded:
        counted = xp.add(arange_like(shape(raw, xp=xp)[-1], raw, xp), j * tiles.sizes[1])
        admitted.append(xp.less(counted, tiles.lengths[1]))
    allowed, *others = admitted
    for each in others:
        allowed = xp.logical_and(allowed, each)
    return allowed


def mask_limit(allowed: Array, like: Array, xp: Namespace) -> Array:
    """An infinity above what is allowed, or below: the least of that and scores is found far faster than a choice."""
    return xp.multiply(xp.subtract(xp.astype(allowed, like.dtype), 0.5), math.inf)


def fold_group(x: Array, xp: Namespace) -> Array:
    """The rows of all query heads that share a key/value head, one below the other: (G, R * m, ...)."""
    groups, times, rows, width = shape(x, xp=xp)
    return xp.reshape(x, (groups, times * rows, width))


def matmul_per_group(weights: Array, value: Array, xp: Namespace) -> Array:
    """Weights (G, R, m, n) times values (G, n, E): an array (G, R, m, E)."""
    return xp.reshape(xp.matmul(fold_group(weights, xp), value), (*shape(weights, xp=xp)[:-1], shape(value, xp=xp)[-1]))


def matmul_into_workspace(tiles: Grid, name: str, weights: Array, value: Array) -> Array:
    """The same, perhaps where the next product of this name will be written: fresh memory costs as much time again."""
    xp = tiles.xp
    found = tiles.loops.matmul(fold_group(weights, xp), value, tiles.memory, name)
    return xp.reshape(found, (*shape(weights, xp=xp)[:-1], shape(value, xp=xp)[-1]))


def modifies_scores(tiles: Grid) -> bool:
    return tiles.plan.softcap is not None or tiles.operands.softcap is not None or tiles.plan.score_mod is not None


def score_variables(tiles: Grid) -> tuple[Array, ...]:
    """The arrays of floating point that change scores, and so have a gradient."""
    softcap = tiles.operands.softcap
    own = (array for array in tiles.operands.score_mod if is_floating(array))
    return (*(() if softcap is None else (softcap,)), *own)


def modified_scores(tiles: Grid, raw: Array, variables: tuple[Array, ...], at: Positions | None) -> Array:
    score_mod, remaining = unflatten(tiles.plan.score_mod, ()), iter(variables)
    softcap = tiles.plan.softcap if tiles.operands.softcap is None else next(remaining)
    if score_mod is None:
        return modify_scores(raw, softcap, None, None, xp=tiles.xp)
    arrays = [next(remaining) if is_floating(array) else array for array in tiles.operands.score_mod]
    return modify_scores(raw, softcap, lambda scores, *where: score_mod(scores, *where, *arrays), at, xp=tiles.xp)
