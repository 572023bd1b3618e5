"""Blocks of queries and keys: how a call is cut, which blocks are visited, and the scores of each.

All arrays have the axes of `Operands`. Nothing here knows in which arithmetic a block is summed up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from attention_core._call import changed_scores
from attention_core._namespace import FLOATING, beside, dtype_name, is_concrete, shape
from attention_core._plan import Operands, Plan, operands_of
from attention_core._typing import Array, Namespace
from attention_core.backend import Backend, Loops
from attention_core.masks import Positions, Spans, rebuilt, slots
from attention_core.random import Dropout

MOST_KEPT = 64  # arrays of the size of a block; a window has about 20


class Tiles(NamedTuple):
    """How a call is cut into blocks, and which of them are to be visited."""

    plan: Plan
    operands: Operands
    xp: Namespace
    loops: Loops
    sizes: tuple[int, int]  # of a block
    counts: tuple[Any, Any]  # of blocks
    lengths: tuple[Any, Any]  # M, N
    padded: bool
    memory: dict[str, Any]  # to which products are written that are done with before the next one
    kept: dict[Any, Array] | None = None  # by distance, what a rule about `key - query` alone says of a block


def tiles_of(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> Tiles:
    xp, loops = backend.namespace, backend.loops
    operands = operands_of(plan, arrays)
    lengths = shape(operands.query, xp=xp)[-2], shape(operands.key, xp=xp)[-2]
    sizes, counts = zip(*map(_cut, lengths, plan.blocks), strict=True)
    padded = False
    if loops.traced:
        spare = tuple(count * size - length for count, size, length in zip(counts, sizes, lengths, strict=True))
        padded = not (isinstance(spare[1], int) and spare[1] == 0)
        operands = _padded(operands, spare, xp)
    relative = plan.mask is not None and rebuilt(plan.mask, operands.mask).is_relative()
    repeats = max(sizes) % max(min(sizes), 1) == 0  # else hardly any distance occurs twice
    kept: Any = {} if relative and repeats and operands.bias is None and not loops.traced else None
    return Tiles(plan, operands, xp, loops, sizes, counts, lengths, padded, {}, kept)


def is_one_block(tiles: Tiles) -> bool:
    """Whether a compiler need not be given a loop over keys, as there is one block of them."""
    return tiles.loops.traced and isinstance(tiles.counts[1], int) and tiles.counts[1] == 1


def may_mask(tiles: Tiles) -> bool:
    """Whether a block may hold scores of what is not allowed."""
    return tiles.plan.mask is not None or tiles.operands.bias is not None or tiles.padded


def _cut(length: Any, size: int) -> tuple[int, Any]:
    """The size of blocks of nearly equal size, and their number."""
    if not isinstance(length, int):
        return size, (length + (size - 1)) // size
    count = max(1, -(-length // size))
    return -(-length // count), count


def _padded(operands: Operands, spare: tuple[Any, ...], xp: Namespace) -> Operands:
    """The operands with zeros at the end of queries and keys, to fill up the last block."""
    query, key, value, bias = operands[:4]
    if bias is not None:
        for axis, amount in ((-2, spare[0]), (-1, spare[1])):
            bias = bias if is_one(bias, axis) else pad(bias, axis, amount, xp)
    return operands._replace(
        query=pad(query, -2, spare[0], xp),
        key=pad(key, -2, spare[1], xp),
        value=pad(value, -2, spare[1], xp),
        bias=bias,
    )


def pad(x: Array, axis: int, amount: Any, xp: Namespace, number: float = 0.0) -> Array:
    """A number at the end of an axis, so many times."""
    if isinstance(amount, int) and amount == 0:
        return x
    dims = list(shape(x, xp=xp))
    dims[axis] = amount
    return xp.concat([x, xp.full(tuple(dims), number, dtype=x.dtype, **beside(x))], axis=axis)


def is_one(x: Array, axis: int) -> bool:
    """Whether an axis has length 1 and stands for all positions."""
    dim = x.shape[axis]
    return isinstance(dim, int) and dim == 1


class Visits(NamedTuple):
    """For each block of one side, the blocks of the other in the order of visiting: ``whole`` of them need no mask.

    Attributes
    ----------
    order : (B or 1, blocks, blocks of the other side) or None
        ``None`` for all, as they come.
    whole, seen : (B or 1, blocks) or int
    shared : bool
        Whether there is one entry, for all of the batch.
    """

    order: Any
    whole: Any
    seen: Any
    shared: bool = True

    def of(self, loops: Loops, b: Any, index: Any) -> tuple[Callable[[Any], Any], Any, Any]:
        """Of one block: what comes at each step, and the numbers of steps without a mask, and of all."""
        if self.order is None:
            return lambda step: step, self.whole, self.seen
        order, whole, seen = (
            loops.item(loops.item(table, 0 if self.shared else b), index)
            for table in (self.order, self.whole, self.seen)
        )
        return lambda step: loops.item(order, step), whole, seen


def visits_of(tiles: Tiles, *, by_key: bool, run_keys: int = 0) -> Visits:
    """The blocks to be visited; where loops are not traced, runs of neighbours with up to so many keys as one."""
    plan, operands, xp, loops = tiles.plan, tiles.operands, tiles.xp, tiles.loops
    rows, columns = tiles.counts
    along = rows if by_key else columns
    if plan.mask is None and not tiles.padded:
        return Visits(None, 0 if plan.guarded else along, along)
    asked = (*operands.mask, *(start for start in operands[6:8] if start is not None))
    if not loops.traced and not all(map(is_concrete, asked)):
        return Visits(None, 0, along)
    some, every = _grid(tiles)
    if by_key:
        some, every = xp.matrix_transpose(some), xp.matrix_transpose(every)
    if not loops.traced:
        return _listed(loops.read(some), loops.read(every), max(1, run_keys // tiles.sizes[1]))
    kind = xp.where(every, 0, xp.where(some, 1, xp.full_like(some, 2, dtype=xp.int32)))
    whole, seen = (xp.sum(xp.astype(each, xp.int32), axis=-1, dtype=xp.int32) for each in (every, some))
    return Visits(xp.astype(xp.argsort(kind, axis=-1, stable=True), xp.int32), whole, seen, is_one(kind, 0))


def visit(loops: Loops, whole: Any, seen: Any, absorb: Callable[[bool, Any, Any], Any], state: Any) -> Any:
    """Absorb the blocks that need no mask, then those that do; a loop that can have no step is not even traced."""
    if not (isinstance(whole, int) and whole == 0):
        state = loops.loop(0, whole, functools.partial(absorb, False), state)
    return state if seen is whole else loops.loop(whole, seen, functools.partial(absorb, True), state)


def _listed(some: list[Any], every: list[Any], longest: int) -> Visits:
    """What is visited, as lists of Python integers, or of ranges of them if runs may be longer than one."""
    order, whole, seen = [], [], []
    for tables in zip(some, every, strict=True):
        pieces = [list(_pieces(may, is_full, longest)) for may, is_full in zip(*tables, strict=True)]
        split = [[[place for place, kind in line if kind is wanted] for wanted in (True, False)] for line in pieces]
        order.append([full + mixed for full, mixed in split])
        whole.append([len(full) for full, _ in split])
        seen.append([len(line) for line in pieces])
    return Visits(order, whole, seen, len(order) == 1)


def _pieces(may: list[bool], is_full: list[bool], longest: int) -> Iterator[tuple[Any, bool]]:
    """The blocks in which something is allowed, in runs of neighbours, and whether everything is."""
    place = 0
    while place < len(may):
        stop = place + 1
        while may[place] and stop < min(len(may), place + longest) and may[stop]:
            stop += 1
        if may[place]:
            yield (place if longest == 1 else range(place, stop)), all(is_full[place:stop])
        place = stop


def _grid(tiles: Tiles) -> tuple[Array, Array]:
    """In which blocks something is allowed, and in which everything is: two of shape (B or 1, rows, columns)."""
    plan, operands, xp = tiles.plan, tiles.operands, tiles.xp
    some: Any = True
    every: Any = True
    query, key = (_spans(tiles, side) for side in (0, 1))
    if plan.mask is not None:
        some, every = rebuilt(plan.mask, operands.mask).blocks(query, key, xp=xp)
    if operands.bias is not None:
        every = False
    if tiles.padded and every is not False:
        ends = xp.multiply(xp.add(_counted(tiles.counts[1], key.first, xp), 1), tiles.sizes[1])
        inside = xp.less_equal(ends, tiles.lengths[1])
        every = inside if every is True else xp.logical_and(every, inside)
    none = xp.zeros((1, 1, *tiles.counts), dtype=xp.bool, **beside(operands.query))
    for kind in (some, every):  # both get the leading axis that one of them has
        none = none if isinstance(kind, bool) else xp.logical_and(xp.logical_or(none, kind), xp.logical_not(kind))
    some, every = (
        xp.logical_not(none) if kind is True else none if kind is False else xp.logical_or(none, kind)
        for kind in (some, every)
    )
    return xp.any(some, axis=-3), xp.all(every, axis=-3)


def _counted(count: Any, like: Array, xp: Namespace) -> Array:
    return xp.arange(count, dtype=xp.int32, **beside(like))


def _start(tiles: Tiles, side: int) -> Any:
    """The position of the first query or key."""
    held = tiles.operands[6 + side]
    return tiles.plan.starts[side] if held is None else tiles.xp.astype(held, tiles.xp.int32)


def _from(tiles: Tiles, side: int, places: Array) -> Array:
    """The positions of queries or keys that are counted from 0."""
    start = _start(tiles, side)
    return places if isinstance(start, int) and start == 0 else tiles.xp.add(places, start)


def _to_end(tiles: Tiles, side: int, positions: Array) -> Array:
    """Positions in blocks, of which what only fills up the last block counts as the last position."""
    size, count, length = tiles.sizes[side], tiles.counts[side], tiles.lengths[side]
    if isinstance(length, int) and size * count == length:
        return positions
    end = _start(tiles, side) + (length - 1)
    return tiles.xp.minimum(positions, tiles.xp.add(tiles.xp.zeros_like(positions), end))


def _spans(tiles: Tiles, side: int) -> Spans:
    """The positions of the blocks of queries, as a column, or of keys."""
    xp, size = tiles.xp, tiles.sizes[side]
    first = _from(tiles, side, xp.multiply(_counted(tiles.counts[side], tiles.operands.query, xp), size))
    last = _to_end(tiles, side, xp.add(first, size - 1))
    if side == 0:
        first, last = xp.expand_dims(first, axis=-1), xp.expand_dims(last, axis=-1)
    return Spans(first, last, size)


class Entry(NamedTuple):
    """One entry of the batch, or one key/value head of it."""

    index: Any  # in the batch
    head: Any  # None for all heads
    query: Array  # (G, R, M, D)
    key: Array  # (G, N, D)
    value: Array  # (G, N, E)
    bias: Array | None
    rule: Any


def entry_of(tiles: Tiles, index: Any) -> Entry:
    plan, operands = tiles.plan, tiles.operands
    groups = operands.key.shape[1]
    b, g = (index // groups, index % groups) if plan.apart else (index, None)
    rule = None
    if plan.mask is not None:
        own = {slot.place: slot.axes for slot in slots(plan.mask)}
        held = [
            array if own[place] < 0 else of_entry(tiles, array, b, g if own[place] == 3 else None)
            for place, array in enumerate(operands.mask)
        ]
        rule = rebuilt(plan.mask, held)
    query, key, value = (of_entry(tiles, x, b, g) for x in operands[:3])
    return Entry(b, g, query, key, value, None if operands.bias is None else of_entry(tiles, operands.bias, b, g), rule)


def of_entry(tiles: Tiles, x: Array, b: Any, g: Any) -> Array:
    x = tiles.loops.item(x, 0 if is_one(x, 0) else b)
    return x if g is None or is_one(x, 0) else tiles.xp.expand_dims(tiles.loops.item(x, g), axis=0)


class Tile(NamedTuple):
    """A block of queries against a block of keys."""

    raw: Array  # scores before anything is changed, (G, R, m, n)
    scores: Array  # with -inf where nothing is allowed
    allowed: Array | None
    at: Positions | None


def tile_of(tiles: Tiles, entry: Entry, query: Array, key: Array, i: Any, j: Any, masked: bool) -> Tile:
    plan, xp = tiles.plan, tiles.xp
    raw = passing_product(tiles, "scores", query, key)
    at, bias, allowed = ground_of(tiles, entry, raw, i, j, masked)
    scores = raw
    if has_changes(tiles):
        if allowed is not None:
            raw = xp.where(allowed, raw, 0.0)  # what overflows and is masked must not meet the cap's gradient
        scores = changed(tiles, raw, variables_of(tiles), at)
    if bias is not None or plan.score_mod is not None:
        scores = xp.add(scores, 0.0 if bias is None else bias)  # in memory of its own: exponentials may take it over
    if allowed is not None and plan.tame and plan.score_mod is None:  # which may make nan of what is masked
        most = once_for(tiles, "limit", i, j, allowed, lambda: limit(allowed, raw, xp))
        scores = tiles.loops.over(xp.minimum, scores, most)
    elif allowed is not None:
        scores = xp.where(allowed, scores, -math.inf)
    return Tile(raw, scores, allowed, at)


def ground_of(
    tiles: Tiles, entry: Entry, raw: Array, i: Any, j: Any, masked: bool
) -> tuple[Positions | None, Array | None, Array | None]:
    """Of a block of scores: where they stand if anything asks for that, their bias, and where they are allowed."""
    plan = tiles.plan
    at = positions_of(tiles, entry, i, j, raw) if plan.score_mod is not None or plan.rate else None
    bias = entry.bias
    if bias is not None:
        for axis, place in ((-2, i), (-1, j)):
            bias = bias if is_one(bias, axis) else tiles.loops.block(bias, place, tiles.sizes[axis], axis)
    if not masked:
        return at, bias, None
    return at, bias, once_for(tiles, "allowed", i, j, raw, lambda: _allowed(tiles, entry, bias, i, j, at, raw))


def once_for(tiles: Tiles, name: str, i: Any, j: Any, like: Array, found: Callable[[], Array]) -> Array:
    """What is found for a block of this shape, once for all blocks at the same distance if that decides."""
    if tiles.kept is None:
        return found()
    distance = _first_of(i) * tiles.sizes[0] - _first_of(j) * tiles.sizes[1]
    place = name, distance, *like.shape[-2:]
    if place in tiles.kept:
        return tiles.kept[place]
    result = found()
    if len(tiles.kept) < MOST_KEPT:
        tiles.kept[place] = result
    return result


def _allowed(tiles: Tiles, entry: Entry, bias: Array | None, i: Any, j: Any, at: Positions | None, raw: Array) -> Array:
    xp = tiles.xp
    admitted = []
    if entry.rule is not None:
        admitted.append(entry.rule.allowed(positions_of(tiles, entry, i, j, raw) if at is None else at, xp=xp))
    if bias is not None:
        admitted.append(xp.not_equal(bias, -math.inf))
    if tiles.padded:
        counted = xp.add(_counted(shape(raw, xp=xp)[-1], raw, xp), j * tiles.sizes[1])
        admitted.append(xp.less(counted, tiles.lengths[1]))
    allowed, *others = admitted
    for each in others:
        allowed = xp.logical_and(allowed, each)
    return allowed


def limit(allowed: Array, like: Array, xp: Namespace) -> Array:
    """An infinity above what is allowed, or below: the least of that and scores is found far faster than a choice."""
    return xp.multiply(xp.subtract(xp.astype(allowed, like.dtype), 0.5), math.inf)


def rows_of(x: Array, xp: Namespace) -> Array:
    """The rows of all query heads that share a key/value head, one below the other: (G, R * m, ...)."""
    groups, times, rows, width = shape(x, xp=xp)
    return xp.reshape(x, (groups, times * rows, width))


def product(weights: Array, value: Array, xp: Namespace) -> Array:
    """Weights (G, R, m, n) times values (G, n, E): an array (G, R, m, E)."""
    return xp.reshape(xp.matmul(rows_of(weights, xp), value), (*shape(weights, xp=xp)[:-1], shape(value, xp=xp)[-1]))


def passing_product(tiles: Tiles, name: str, weights: Array, value: Array) -> Array:
    """The same, perhaps where the next product of this name will be written: fresh memory costs as much time again."""
    xp = tiles.xp
    found = tiles.loops.matmul(rows_of(weights, xp), value, tiles.memory, name)
    return xp.reshape(found, (*shape(weights, xp=xp)[:-1], shape(value, xp=xp)[-1]))


def _first_of(place: Any) -> Any:
    """The first of the blocks at a place, which may be a run of them."""
    return place.start if isinstance(place, range) else place


def positions_of(tiles: Tiles, entry: Entry, i: Any, j: Any, scores: Array) -> Positions:
    xp, like = tiles.xp, entry.query
    groups, times, rows, columns = shape(scores, xp=xp)
    heads = _counted(groups * times, like, xp)
    if entry.head is not None:
        heads = xp.add(heads, entry.head * times)
    query, key = (
        _to_end(
            tiles, side, _from(tiles, side, xp.add(_counted(count, like, xp), _first_of(place) * tiles.sizes[side]))
        )
        for side, (count, place) in enumerate(((rows, i), (columns, j)))
    )
    batch = xp.add(xp.zeros((), dtype=xp.int32, **beside(like)), entry.index)
    return Positions(batch, xp.reshape(heads, (groups, times, 1, 1)), xp.expand_dims(query, axis=-1), key)


def has_changes(tiles: Tiles) -> bool:
    return tiles.plan.softcap is not None or tiles.operands.softcap is not None or tiles.plan.score_mod is not None


def variables_of(tiles: Tiles) -> tuple[Array, ...]:
    """The arrays of floating point that change scores, and so have a gradient."""
    softcap = tiles.operands.softcap
    own = (array for array in tiles.operands.score_mod if is_floating(array))
    return (*(() if softcap is None else (softcap,)), *own)


def is_floating(array: Array) -> bool:
    return dtype_name(array.dtype) in FLOATING


def changed(tiles: Tiles, raw: Array, variables: tuple[Array, ...], at: Positions | None) -> Array:
    score_mod, remaining = rebuilt(tiles.plan.score_mod, ()), iter(variables)
    softcap = tiles.plan.softcap if tiles.operands.softcap is None else next(remaining)
    if score_mod is None:
        return changed_scores(raw, softcap, None, None, tiles.xp)
    arrays = [next(remaining) if is_floating(array) else array for array in tiles.operands.score_mod]
    return changed_scores(raw, softcap, lambda scores, *where: score_mod(scores, *where, *arrays), at, tiles.xp)


def dropout_of(tiles: Tiles) -> Dropout | None:
    plan, seed = tiles.plan, tiles.operands.seed
    return Dropout(plan.rate, plan.seed if seed is None else seed) if plan.rate else None


def heads_of(tiles: Tiles) -> Any:
    """How many query heads there are."""
    _, groups, times = shape(tiles.operands.query, xp=tiles.xp)[:3]
    return groups * times


def rounds_of(tiles: Tiles) -> Any:
    """How many entries of the batch there are, or heads of all of them where these are taken one by one."""
    entries, groups = shape(tiles.operands.query, xp=tiles.xp)[:2]
    return entries * groups if tiles.plan.apart else entries


def zeros(like: Array, *dims: Any, xp: Namespace) -> Array:
    return xp.zeros(dims, dtype=like.dtype, **beside(like))


def collected(tiles: Tiles, stack: Any, side: int) -> Array:
    """The blocks of queries or keys (axis -2) as one array (B, G, ..., length, width)."""
    xp, loops = tiles.xp, tiles.loops
    found = loops.array(loops.join(stack, tiles.counts[side], -2))[..., : tiles.lengths[side], :]
    entries, groups = shape(tiles.operands.query, xp=xp)[:2]
    return xp.reshape(found, (entries, groups, *shape(found, xp=xp)[2:]))


def swept(
    tiles: Tiles,
    average: Callable[[Callable[[Array], Array]], tuple[Array, ...]],
    empty: Callable[[], tuple[Array, ...]],
) -> tuple[Array, ...]:
    """The results of ``average(part)``, which averages a part of the values: of all, whether finite or not.

    What is not finite and attended shows, whatever its weight: inf and nan pull upwards, -inf and nan downwards. That
    takes two more sweeps, in which the values tell where such are; a loop holds the sweeps, as it is traced once.
    """
    if tiles.plan.tame:
        return average(lambda values: values)
    xp = tiles.xp
    infinite = xp.logical_not(xp.all(xp.isfinite(tiles.operands.value)))
    sweeps = xp.add(xp.multiply(xp.astype(infinite, xp.int32), 2), 1)

    def sweep(number: Any, results: tuple[Array, ...]) -> tuple[Array, ...]:
        pull = _times_infinity(3 - 2 * number, results[0], xp)  # sweep 1 looks for inf, sweep 2 for -inf

        def part(values: Array) -> Array:
            pulling = xp.astype(xp.logical_or(xp.isnan(values), xp.equal(values, pull)), values.dtype)
            return _first(number, finite(tiles, values), pulling, xp)

        output, *rest = average(part)
        found = xp.greater(output, 0.0)
        torn = xp.logical_and(found, xp.equal(results[0], -pull))  # inf - inf is nan, about which NumPy would warn
        before = xp.where(torn, math.nan, results[0])
        return _first(number, output, xp.add(before, xp.where(found, pull, xp.zeros_like(output))), xp), *rest

    return tiles.loops.loop(0, sweeps, sweep, empty())  # type: ignore[no-any-return]


def _first(number: Any, first: Array, other: Array, xp: Namespace) -> Array:
    """One array for the number 0, and another for those after it."""
    if isinstance(number, int):
        return other if number else first
    return xp.where(xp.equal(number, 0), first, other)


def _times_infinity(sign: Any, like: Array, xp: Namespace) -> Any:
    return sign * math.inf if isinstance(sign, int) else xp.multiply(xp.astype(sign, like.dtype), math.inf)


def scored(tiles: Tiles, x: Array) -> Array:
    """A block of queries or keys for the scores: a vector that is not finite gives nan wherever it is attended."""
    if tiles.plan.tame:
        return x
    xp = tiles.xp
    return xp.where(xp.all(xp.isfinite(x), axis=-1, keepdims=True), x, math.nan)


def finite(tiles: Tiles, x: Array) -> Array:
    """The finite elements of a block, by which others are multiplied."""
    return x if tiles.plan.tame else tiles.xp.where(tiles.xp.isfinite(x), x, 0.0)
