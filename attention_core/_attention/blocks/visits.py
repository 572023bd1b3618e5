"""Which blocks are visited, in which order, which of them need no mask, and the scores of each."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..._arrays import Array, Arrays, Namespace, is_floating, map_leaves, on_device_of, positions, shape
from ..._backend import is_concrete, is_on_host, numbers_of
from ...masks import Mask, Positions, flatten, unflatten
from ...masks._band import UNKNOWN
from ...masks._mask import band_of
from ..call import Call, allowed_by, is_listed, modify_scores
from ..parts import keys_of
from .grid import Grid, Sample, is_broadcast, matmul_per_group


class Visits(NamedTuple):
    """For each block of one side, the blocks of the other side in the order of visiting."""

    order: Any  # (B or 1, blocks, blocks of the other side), or None for all, as they come
    whole: Any  # (B or 1, blocks) or an integer: how many come first that need no mask
    seen: Any  # likewise: how many are visited at all
    shared: bool = True  # whether all samples of the batch share one order


def make_visits(grid: Grid, *, by_key: bool, run_keys: int = 0) -> Visits | None:
    """The blocks to be visited; where loops are not traced, runs of neighbours with up to so many keys as one.

    ``None`` for one block of keys, without a loop, which is not left out.
    """
    call, xp, loops = grid.call, grid.xp, grid.loops
    rows, columns = grid.counts
    along = rows if by_key else columns
    if not by_key and isinstance(columns, int) and columns == 1 and (loops.traced or call.mask is None):
        return None
    if call.mask is None and not grid.padded:
        return Visits(None, 0 if grid.may_be_empty else along, along)
    if not loops.traced:
        kinds = _listed_kinds(grid)
        if kinds is None:
            return Visits(None, 0, along)
        longest = max(1, run_keys // grid.sizes[1])
        tables = [[_runs(line, longest) for line in (zip(*table, strict=True) if by_key else table)] for table in kinds]
        order, whole, seen = ([[line[n] for line in table] for table in tables] for n in range(3))
        return Visits(order, whole, seen, len(tables) == 1)
    some, every = _block_kinds(grid)
    if by_key:
        some, every = xp.matrix_transpose(some), xp.matrix_transpose(every)
    kind = xp.where(every, 0, xp.where(some, 1, xp.full_like(some, 2, dtype=xp.int32)))
    whole, seen = (xp.sum(xp.astype(blocks, xp.int32), axis=-1, dtype=xp.int32) for blocks in (every, some))
    return Visits(xp.astype(xp.argsort(kind, axis=-1, stable=True), xp.int32), whole, seen, is_broadcast(kind, 0))


def visit_blocks(grid: Grid, b: Any, index: Any, absorb: Callable[[bool, Any, Any], Any], state: Any) -> Any:
    """Absorb the blocks that need no mask, then those that do: ``absorb(masked, other, state)`` with the other index.

    A loop that can have no step is not traced.
    """
    loops, (order, whole, seen, shared) = grid.loops, grid.visits
    if order is not None:
        order, whole, seen = [
            loops.block_at(loops.block_at(table, 0 if shared else b), index) for table in (order, whole, seen)
        ]

    def visit(masked: bool, step: Any, state: Any) -> Any:
        return absorb(masked, loops.block_at(order, step), state)

    body = absorb if order is None else visit
    if not (isinstance(whole, int) and whole == 0):
        state = loops.loop(0, whole, functools.partial(body, False), state)
    return state if seen is whole else loops.loop(whole, seen, functools.partial(body, True), state)


class QueryRows(NamedTuple):
    """A block of queries, next to all keys of its sample."""

    grid: Grid
    sample: Sample
    i: Any  # index of the block of queries

    def visit(self, absorb: Callable[[bool, Any, Any], Any], state: Any) -> Any:
        """Absorb the blocks of keys that these queries attend to."""
        if self.grid.visits is None:
            return absorb(self.grid.may_mask, 0, state)
        return visit_blocks(self.grid, self.sample.index, self.i, absorb, state)

    def block_of(self, x: Array) -> Array:
        """The block of these queries, of an array (B, G, R, M, ...)."""
        return self.block(self.grid.part_of(x, self.sample.index, self.sample.head))

    def block(self, x: Array) -> Array:
        """The same of an array (G, R, M, ...) of this sample."""
        return self.grid.loops.block(x, self.i, self.grid.sizes[0], -2)


def for_each_rows(
    grid: Grid,
    prepare: Callable[[Sample], Any],
    compute: Callable[[QueryRows, Any], Arrays],
    accumulators: tuple[Any, ...],
) -> Arrays:
    """Arrays (B, G, R, M, ...) of what ``compute(rows, prepared)`` returns for each block of queries.

    ``prepared`` is what ``prepare(sample)`` returns, which is called once for all blocks of queries of a sample.
    """
    loops = grid.loops
    if grid.visits is None:
        grid = grid._replace(visits=make_visits(grid, by_key=False))

    def add_sample(index: Any, accumulators: Any) -> Any:
        sample = grid.sample_at(index)
        prepared = prepare(sample)

        def add_rows(i: Any, accumulators: Any) -> Any:
            row_blocks = itertools.repeat(sample.round * grid.counts[0] + i, len(accumulators))
            return tuple(map(loops.add_block, accumulators, row_blocks, compute(QueryRows(grid, sample, i), prepared)))

        return loops.for_each(grid.counts[0], add_rows, accumulators, grid.work)

    return tuple(grid.concat_blocks(grid.for_each_sample(add_sample, accumulators), 0))


def for_each_keys(
    grid: Grid, prepare: Callable[[Sample], Any], add: Callable[..., Any], sums: Any, *, is_shared: bool = False
) -> Any:
    """Sums over all blocks of scores, which are visited key by key: stacks of blocks of either side, and others.

    ``prepare(sample)`` returns what is known of queries, and a tree of arrays of keys (G, N, ...). With blocks of
    these, ``add(sample, of_rows, keys, j, masked, i, sums)`` adds what a block of scores has to the sums. With
    ``is_shared``, all samples add to the same.
    """
    grid = grid._replace(visits=make_visits(grid, by_key=True))

    def add_sample(index: Any, sums: Any) -> Any:
        sample = grid.sample_at(index)
        of_rows, of_keys = prepare(sample)

        def add_keys(j: Any, sums: Any) -> Any:
            keys = map_leaves(functools.partial(grid.loops.block, index=j, size=grid.sizes[1], axis=-2), of_keys)
            return visit_blocks(grid, sample.index, j, functools.partial(add, sample, of_rows, keys, j), sums)

        return grid.loops.loop(0, grid.counts[1], add_keys, sums)

    return grid.for_each_sample(add_sample, sums, is_shared=is_shared)


def _listed_kinds(grid: Grid) -> list[Any] | None:
    """`_block_kinds` as lists of 0 (nothing is allowed), 1 and 2 (everything is), ``None`` where they cannot be read.

    They are found by the numbers of a rule where these say all, or where an accelerator would be waited for.
    """
    call, xp, (first, start) = grid.call, grid.xp, grid.call.starts
    are_known = isinstance(first, int) and isinstance(start, int)
    band = band_of(call.mask) if are_known else UNKNOWN
    if is_on_host(call.query) and not band.is_exact:
        some, every = (xp.astype(kind, xp.int32) for kind in _block_kinds(grid))
        kinds = xp.add(some, every)
        return numbers_of(kinds) if is_concrete(kinds) else None
    first, start = (at if isinstance(at, int) else 0 for at in call.starts)
    band, (rows, columns), table = band._replace(is_exact=band.is_exact and call.bias is None), grid.lengths, []
    ends = [(at, min(at + grid.sizes[1], columns)) for at in range(0, columns, grid.sizes[1])]
    for at in range(first, first + rows, grid.sizes[0]):
        reach = keys_of(band, (at, min(at + grid.sizes[0], first + rows) - 1), start, columns)
        seen = [stop > reach.first and begin < reach.stop for begin, stop in ends]
        full = [reach.every_first <= begin and stop <= reach.every_stop for begin, stop in ends]
        table.append([int(some) + (some and every) for some, every in zip(seen, full, strict=True)])
    return [table]


def _runs(kinds: Sequence[int], longest: int) -> tuple[list[Any], int, int]:
    """The blocks in which something is allowed, in runs of neighbours, those first that need no mask; and how many.

    They are integers, or ranges if runs may be longer than one.
    """
    whole: list[Any] = []
    mixed: list[Any] = []
    start = 0
    while start < len(kinds):
        stop = start + 1
        while kinds[start] and stop < min(len(kinds), start + longest) and kinds[stop]:
            stop += 1
        if kinds[start]:
            (whole if min(kinds[start:stop]) == 2 else mixed).append(start if longest == 1 else range(start, stop))
        start = stop
    return whole + mixed, len(whole), len(whole) + len(mixed)


def _block_kinds(grid: Grid) -> tuple[Array, Array]:
    """In which blocks something is allowed, and in which everything is: two of shape (B or 1, rows, columns)."""
    call, xp = grid.call, grid.xp
    query, key = (grid.spans(side) for side in (0, 1))
    some = every = xp.ones((1, 1, *grid.counts), dtype=xp.bool, **on_device_of(call.query))
    if call.mask is not None:  # by its bounds alone, where positions are no neighbours
        kind: Any = Mask if any(map(is_listed, call.starts)) else type(call.mask)
        some, every = (xp.logical_and(some, flags) for flags in kind.blocks(call.mask, query, key, xp=xp))
    if call.bias is not None:
        every = xp.zeros_like(every)
    if grid.padded:
        ends = xp.multiply(xp.add(positions(grid.counts[1], key.first, xp=xp), 1), grid.sizes[1])
        every = xp.logical_and(every, xp.less_equal(ends, grid.lengths[1]))
    return xp.any(some, axis=-3), xp.all(every, axis=-3)


class ScoreBlock(NamedTuple):
    """The scores (G, R, m, n) of a block of queries against a block of keys."""

    raw: Array  # products of queries and keys
    scores: Array  # with -inf where masked
    allowed: Array | None
    at: Positions | None


def score_block(grid: Grid, sample: Sample, query: Array, key: Array, *, i: Any, j: Any, masked: bool) -> ScoreBlock:
    """The scores of a block of queries against a block of keys (G, D, n), with -inf where masked."""
    xp = grid.xp
    raw = matmul_per_group(query, key, xp)
    at, bias, allowed = block_context(grid, sample, raw, i, j=j, masked=masked)
    scores = raw
    if grid.changes_scores:
        raw = raw if allowed is None else xp.where(allowed, raw, 0.0)  # no gradient of theirs may be one of infinity
        scores = modified_scores(grid, raw, score_variables(grid.call), at)
    if bias is not None:
        scores = xp.add(scores, bias)
    scores = grid.weighed(scores, xp.zeros_like)
    if allowed is not None and grid.all_finite and grid.call.score_mod is None:  # which may make NaN of what is masked
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
    _, arrays = flatten((call.softcap, call.score_mod))
    return tuple([array for array in arrays if is_floating(array)])


def modified_scores(grid: Grid, raw: Array, variables: Arrays, at: Positions | None) -> Array:
    """Scores after softcap and score modification, as a function of `score_variables` too."""
    (treedef, arrays), remaining = flatten((grid.call.softcap, grid.call.score_mod)), iter(variables)
    softcap, score_mod = unflatten(treedef, [next(remaining) if is_floating(x) else x for x in arrays])
    return modify_scores(raw, softcap, score_mod, at, xp=grid.xp)
