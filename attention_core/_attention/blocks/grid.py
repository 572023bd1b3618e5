"""Blocks of queries and keys: how a call is cut, which blocks are visited, and the scores of each.

All arrays have the axes of `Operands`. Nothing here knows in which arithmetic a block is summed up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from attention_core._arrays import Array, Namespace, on_device_of, shape
from attention_core._attention.blocks.plan import Operands, Plan, unpack_operands
from attention_core._backend import Backend, Loops
from attention_core.masks import Positions, Spans, unflatten
from attention_core.masks._tree import leaves
from attention_core.random import Dropout

MAX_CACHED = 64  # arrays of the size of a block; a window has about 20


class Grid(NamedTuple):
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


def make_grid(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> Grid:
    xp, loops = backend.namespace, backend.loops
    operands = unpack_operands(plan, arrays)
    lengths = shape(operands.query, xp=xp)[-2], shape(operands.key, xp=xp)[-2]
    sizes, counts = zip(*map(_split_evenly, lengths, plan.block_sizes), strict=True)
    padded = False
    if loops.traced:
        spare = tuple(count * size - length for count, size, length in zip(counts, sizes, lengths, strict=True))
        padded = not (isinstance(spare[1], int) and spare[1] == 0)
        operands = _pad_operands(operands, spare, xp)
    relative = plan.mask is not None and unflatten(plan.mask, operands.mask).is_relative()
    repeats = max(sizes) % max(min(sizes), 1) == 0  # else hardly any distance occurs twice
    kept: Any = {} if relative and repeats and operands.bias is None and not loops.traced else None
    return Grid(plan, operands, xp, loops, sizes, counts, lengths, padded, {}, kept)


def is_one_block(tiles: Grid) -> bool:
    """Whether a compiler need not be given a loop over keys, as there is one block of them."""
    return tiles.loops.traced and isinstance(tiles.counts[1], int) and tiles.counts[1] == 1


def may_mask(tiles: Grid) -> bool:
    """Whether a block may hold scores of what is not allowed."""
    return tiles.plan.mask is not None or tiles.operands.bias is not None or tiles.padded


def _split_evenly(length: Any, size: int) -> tuple[int, Any]:
    """The size of blocks of nearly equal size, and their number."""
    if not isinstance(length, int):
        return size, (length + (size - 1)) // size
    count = max(1, -(-length // size))
    return -(-length // count), count


def _pad_operands(operands: Operands, spare: tuple[Any, ...], xp: Namespace) -> Operands:
    """The operands with zeros at the end of queries and keys, to fill up the last block."""
    query, key, value, bias = operands[:4]
    if bias is not None:
        for axis, amount in ((-2, spare[0]), (-1, spare[1])):
            bias = bias if is_broadcast(bias, axis) else pad(bias, axis, amount, xp)
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
    return xp.concat([x, xp.full(tuple(dims), number, dtype=x.dtype, **on_device_of(x))], axis=axis)


def is_broadcast(x: Array, axis: int) -> bool:
    """Whether an axis has length 1 and stands for all positions."""
    dim = x.shape[axis]
    return isinstance(dim, int) and dim == 1


def arange_like(count: Any, like: Array, xp: Namespace) -> Array:
    return xp.arange(count, dtype=xp.int32, **on_device_of(like))


def first_position(tiles: Grid, side: int) -> Any:
    """The position of the first query or key."""
    held = tiles.operands[6 + side]
    return tiles.plan.starts[side] if held is None else tiles.xp.astype(held, tiles.xp.int32)


def _absolute(tiles: Grid, side: int, places: Array) -> Array:
    """The positions of queries or keys that are counted from 0."""
    start = first_position(tiles, side)
    return places if isinstance(start, int) and start == 0 else tiles.xp.add(places, start)


def _clamp_to_last(tiles: Grid, side: int, positions: Array) -> Array:
    """Positions in blocks, of which what only fills up the last block counts as the last position."""
    size, count, length = tiles.sizes[side], tiles.counts[side], tiles.lengths[side]
    if isinstance(length, int) and size * count == length:
        return positions
    end = first_position(tiles, side) + (length - 1)
    return tiles.xp.minimum(positions, tiles.xp.add(tiles.xp.zeros_like(positions), end))


def block_spans(tiles: Grid, side: int) -> Spans:
    """The positions of the blocks of queries, as a column, or of keys."""
    xp, size = tiles.xp, tiles.sizes[side]
    first = _absolute(tiles, side, xp.multiply(arange_like(tiles.counts[side], tiles.operands.query, xp), size))
    last = _clamp_to_last(tiles, side, xp.add(first, size - 1))
    if side == 0:
        first, last = xp.expand_dims(first, axis=-1), xp.expand_dims(last, axis=-1)
    return Spans(first, last, size)


class BatchEntry(NamedTuple):
    """One entry of the batch, or one key/value head of it."""

    index: Any  # in the batch
    head: Any  # None for all heads
    query: Array  # (G, R, M, D)
    key: Array  # (G, N, D)
    value: Array  # (G, N, E)
    bias: Array | None
    rule: Any


def batch_entry(tiles: Grid, index: Any) -> BatchEntry:
    plan, operands = tiles.plan, tiles.operands
    groups = operands.key.shape[1]
    b, g = (index // groups, index % groups) if plan.per_head else (index, None)
    rule = None
    if plan.mask is not None:
        own = {slot.place: slot.axes for slot in leaves(plan.mask)}
        held = [
            array if own[place] < 0 else entry_slice(tiles, array, b, g if own[place] == 3 else None)
            for place, array in enumerate(operands.mask)
        ]
        rule = unflatten(plan.mask, held)
    query, key, value = (entry_slice(tiles, x, b, g) for x in operands[:3])
    return BatchEntry(
        b, g, query, key, value, None if operands.bias is None else entry_slice(tiles, operands.bias, b, g), rule
    )


def entry_slice(tiles: Grid, x: Array, b: Any, g: Any) -> Array:
    x = tiles.loops.block_at(x, 0 if is_broadcast(x, 0) else b)
    return x if g is None or is_broadcast(x, 0) else tiles.xp.expand_dims(tiles.loops.block_at(x, g), axis=0)


def cached_by_distance(tiles: Grid, name: str, i: Any, j: Any, like: Array, found: Callable[[], Array]) -> Array:
    """What is found for a block of this shape, once for all blocks at the same distance if that decides."""
    if tiles.kept is None:
        return found()
    distance = first_block(i) * tiles.sizes[0] - first_block(j) * tiles.sizes[1]
    place = name, distance, *like.shape[-2:]
    if place in tiles.kept:
        return tiles.kept[place]
    result = found()
    if len(tiles.kept) < MAX_CACHED:
        tiles.kept[place] = result
    return result


def first_block(place: Any) -> Any:
    """The first of the blocks at a place, which may be a run of them."""
    return place.start if isinstance(place, range) else place


def block_positions(tiles: Grid, entry: BatchEntry, i: Any, j: Any, scores: Array) -> Positions:
    xp, like = tiles.xp, entry.query
    groups, times, rows, columns = shape(scores, xp=xp)
    heads = arange_like(groups * times, like, xp)
    if entry.head is not None:
        heads = xp.add(heads, entry.head * times)
    query, key = (
        _clamp_to_last(
            tiles,
            side,
            _absolute(tiles, side, xp.add(arange_like(count, like, xp), first_block(place) * tiles.sizes[side])),
        )
        for side, (count, place) in enumerate(((rows, i), (columns, j)))
    )
    batch = xp.add(xp.zeros((), dtype=xp.int32, **on_device_of(like)), entry.index)
    return Positions(batch, xp.reshape(heads, (groups, times, 1, 1)), xp.expand_dims(query, axis=-1), key)


def dropout_of(tiles: Grid) -> Dropout | None:
    plan, seed = tiles.plan, tiles.operands.seed
    return Dropout(plan.dropout_rate, plan.seed if seed is None else seed) if plan.dropout_rate else None


def num_heads_of(tiles: Grid) -> Any:
    """How many query heads there are."""
    _, groups, times = shape(tiles.operands.query, xp=tiles.xp)[:3]
    return groups * times


def num_rounds(tiles: Grid) -> Any:
    """How many entries of the batch there are, or heads of all of them where these are taken one by one."""
    entries, groups = shape(tiles.operands.query, xp=tiles.xp)[:2]
    return entries * groups if tiles.plan.per_head else entries
