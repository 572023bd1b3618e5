"""Which blocks are visited, in which order, and which of them need no mask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..._arrays import Array, on_device_of, positions
from ..._backend import is_concrete, is_on_host
from ..._trees import classes
from ...masks import flatten
from ...masks._band import UNKNOWN
from ...masks._mask import band_of
from ...masks._tree import is_of_users
from .grid import Grid, is_broadcast


class Visits(NamedTuple):
    """For each block of one side, the blocks of the other side in the order of visiting."""

    order: Any  # (B or 1, blocks, blocks of the other side), or None for all, as they come
    whole: Any  # (B or 1, blocks) or an integer: how many come first that need no mask
    seen: Any  # likewise: how many are visited at all
    shared: bool = True  # whether all samples of the batch share one order


def make_visits(grid: Grid, *, by_key: bool, run_keys: int = 0) -> Visits:
    """The blocks to be visited; where loops are not traced, runs of neighbours with up to so many keys as one."""
    call, xp, loops = grid.call, grid.xp, grid.loops
    rows, columns = grid.counts
    along = rows if by_key else columns
    if call.mask is None and not grid.padded:
        return Visits(None, 0 if grid.plan.may_mask else along, along)
    if not loops.traced:
        kinds = _listed_kinds(grid)
        if kinds is None:
            return Visits(None, 0, along)
        some, every = ([list(zip(*x, strict=True)) if by_key else x for x in kind] for kind in kinds)
        return _visits_from_lists(some, every, max(1, run_keys // grid.sizes[1]))
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
        order, whole, seen = (
            loops.block_at(loops.block_at(table, 0 if shared else b), index) for table in (order, whole, seen)
        )

    def visit(masked: bool, step: Any, state: Any) -> Any:
        return absorb(masked, loops.block_at(order, step), state)

    body = absorb if order is None else visit
    if not (isinstance(whole, int) and whole == 0):
        state = loops.loop(0, whole, functools.partial(body, False), state)
    return state if seen is whole else loops.loop(whole, seen, functools.partial(body, True), state)


def _listed_kinds(grid: Grid) -> list[Any] | None:
    """`_block_kinds` as lists, ``None`` where they cannot be read.

    They are found by the numbers of a rule where these say all, or where an accelerator would be waited for.
    """
    are_known = all(isinstance(start, int) for start in grid.call.starts)
    band, starts = (band_of(grid.call.mask), grid.call.starts) if are_known else (UNKNOWN, (0, 0))
    if is_on_host(grid.call.query) and not band.is_exact:
        kinds = _block_kinds(grid)
        return list(map(grid.loops.to_list, kinds)) if all(map(is_concrete, kinds)) else None
    queries, keys = (
        [(start + first, start + min(first + size, length) - 1) for first in range(0, count * size, size)]
        for start, count, size, length in zip(starts, grid.counts, grid.sizes, grid.lengths, strict=True)
    )
    is_exact, (low, high, stop, *_) = band.is_exact and grid.call.bias is None, band
    some = [[k[0] - q[1] <= high and k[1] - q[0] >= low and k[0] < stop for k in keys] for q in queries]
    every = [[is_exact and low <= k[0] - q[1] and k[1] - q[0] <= high and k[1] < stop for k in keys] for q in queries]
    return [[some], [every]]


def _visits_from_lists(some: list[Any], every: list[Any], longest: int) -> Visits:
    """Visits as lists of Python integers, or of ranges if runs may be longer than one."""
    order, whole, seen = [], [], []
    for tables in zip(some, every, strict=True):
        pieces = [list(_runs(may, is_full, longest)) for may, is_full in zip(*tables, strict=True)]
        split = [[[block for block, kind in line if kind is wanted] for wanted in (True, False)] for line in pieces]
        order.append([full + mixed for full, mixed in split])
        whole.append([len(full) for full, _ in split])
        seen.append([len(line) for line in pieces])
    return Visits(order, whole, seen, len(order) == 1)


def _runs(may: list[bool], is_full: list[bool], longest: int) -> Iterator[tuple[Any, bool]]:
    """The blocks in which something is allowed, in runs of neighbours, and whether everything is."""
    start = 0
    while start < len(may):
        stop = start + 1
        while may[start] and stop < min(len(may), start + longest) and may[stop]:
            stop += 1
        if may[start]:
            yield (start if longest == 1 else range(start, stop)), all(is_full[start:stop])
        start = stop


def _block_kinds(grid: Grid) -> tuple[Array, Array]:
    """In which blocks something is allowed, and in which everything is: two of shape (B or 1, rows, columns)."""
    call, xp = grid.call, grid.xp
    some: Any = True
    every: Any = True
    query, key = (grid.spans(side) for side in (0, 1))
    is_listed = query.at is not None or key.at is not None
    if is_listed and any(map(is_of_users, classes(flatten(call.mask, [])))):  # who take a block for neighbours
        every = False
    elif call.mask is not None:
        some, every = call.mask.blocks(query, key, xp=xp)
    if call.bias is not None:
        every = False
    if grid.padded and every is not False:
        ends = xp.multiply(xp.add(positions(grid.counts[1], key.first, xp=xp), 1), grid.sizes[1])
        inside = xp.less_equal(ends, grid.lengths[1])
        every = inside if every is True else xp.logical_and(every, inside)
    none = xp.zeros((1, 1, *grid.counts), dtype=xp.bool, **on_device_of(call.query))
    for kind in (some, every):  # both get the leading axis that one of them has
        none = none if isinstance(kind, bool) else xp.logical_and(none, kind)
    some, every = (
        xp.logical_not(none) if kind is True else none if kind is False else xp.logical_or(none, kind)
        for kind in (some, every)
    )
    return xp.any(some, axis=-3), xp.all(every, axis=-3)
