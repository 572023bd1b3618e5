"""The scores of one block: product, softcap, score modification, bias and mask."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from ..._arrays import Array, Arrays, Namespace, is_floating, positions, shape
from ...masks import Positions, flatten, unflatten
from ..call import Call
from ..scores import allowed_by, modify_scores
from .grid import Grid, Sample, is_broadcast, matmul_per_group


class ScoreBlock(NamedTuple):
    """The scores (G, R, m, n) of a block of queries against a block of keys."""

    raw: Array  # products of queries and keys
    scores: Array  # with -inf where masked
    allowed: Array | None
    at: Positions | None


def score_block(grid: Grid, sample: Sample, query: Array, key: Array, *, i: Any, j: Any, masked: bool) -> ScoreBlock:
    """The scores of a block of queries against a block of keys (G, D, n), with -inf where masked."""
    plan, xp = grid.plan, grid.xp
    raw = matmul_per_group(query, key, xp)
    at, bias, allowed = block_context(grid, sample, raw, i, j=j, masked=masked)
    scores = raw
    if grid.changes_scores:
        raw = raw if allowed is None else xp.where(allowed, raw, 0.0)  # no gradient of theirs may be one of infinity
        scores = modified_scores(grid, raw, score_variables(grid.call), at)
    if bias is not None:
        scores = xp.add(scores, bias)
    if allowed is not None and plan.all_finite and grid.call.score_mod is None:  # which may make NaN of what is masked
        limit = grid.cached_by_distance("limit", i, j, like=allowed, compute=lambda: mask_limit(allowed, raw, xp))
        scores = grid.loops.inplace(xp.minimum, scores, limit)
    elif allowed is not None:
        scores = xp.where(allowed, scores, -math.inf)
    return ScoreBlock(raw, scores, allowed, at)


def block_context(
    grid: Grid, sample: Sample, raw: Array, i: Any, j: Any, masked: bool
) -> tuple[Positions | None, Array | None, Array | None]:
    """Of a block of scores: their positions if anything asks for them, their bias, and where they are allowed."""
    at = grid.positions(sample, i, j) if grid.call.score_mod is not None or grid.call.dropout is not None else None
    bias = sample.bias
    if bias is not None:
        for axis, index in ((-2, i), (-1, j)):
            bias = bias if is_broadcast(bias, axis) else grid.loops.block(bias, index, grid.sizes[axis], axis)
    if not masked:
        return at, bias, None
    compute = functools.partial(_allowed_in_block, grid, sample, bias, at=at, raw=raw, i=i, j=j)
    return at, bias, grid.cached_by_distance("allowed", i, j, like=raw, compute=compute)


def _allowed_in_block(
    grid: Grid, sample: Sample, bias: Array | None, *, at: Positions | None, raw: Array, i: Any, j: Any
) -> Array:
    """Where a block is allowed: by the mask, by a bias that is not -inf, and inside of the keys that there are."""
    xp = grid.xp
    at = grid.positions(sample, i, j) if at is None and sample.rule is not None else at
    allowed = allowed_by(sample.rule, bias, at, xp)
    if not grid.padded:
        return allowed
    counted = xp.add(positions(shape(raw, xp=xp)[-1], raw, xp=xp), j * grid.sizes[1])
    inside = xp.less(counted, grid.lengths[1])
    return inside if allowed is None else xp.logical_and(allowed, inside)


def mask_limit(allowed: Array, like: Array, xp: Namespace) -> Array:
    """Inf where allowed and -inf elsewhere: a minimum of this and scores is far faster than a choice."""
    return xp.multiply(xp.subtract(xp.astype(allowed, like.dtype), 0.5), math.inf)


def score_variables(call: Call) -> Arrays:
    """The floating-point arrays of softcap and score modification, which have a gradient."""
    arrays: list[Array] = []
    flatten((call.softcap, call.score_mod), arrays)
    return tuple([array for array in arrays if is_floating(array)])


def modified_scores(grid: Grid, raw: Array, variables: Arrays, at: Positions | None) -> Array:
    """Scores after softcap and score modification, as a function of `score_variables` too."""
    arrays: list[Array] = []
    treedef, remaining = flatten((grid.call.softcap, grid.call.score_mod), arrays), iter(variables)
    softcap, score_mod = unflatten(treedef, [next(remaining) if is_floating(x) else x for x in arrays])
    return modify_scores(raw, softcap, score_mod, at, xp=grid.xp)
