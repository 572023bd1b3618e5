"""The grid of blocks that a call is cut into, and where a block stands. All arrays have the axes of `Operands`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from attention_core._arrays import Array, Namespace, is_on_host, on_device_of, positions, shape
from attention_core._attention.blocks.plan import Operands, Plan
from attention_core._attention.call import counted_from, is_listed
from attention_core._backend import Backend, Loops, Workspace
from attention_core.masks import Positions, Spans, unflatten
from attention_core.masks._tree import leaves
from attention_core.random import Dropout

EXACT_WORK = 8  # the time of a score in reproducible arithmetic, by that of one in fast arithmetic


class Grid(NamedTuple):
    """A call cut into blocks of queries and keys."""

    plan: Plan
    operands: Operands
    xp: Namespace
    loops: Loops
    sizes: tuple[int, int]  # queries and keys of a block
    counts: tuple[Any, Any]  # blocks of queries and of keys
    lengths: tuple[Any, Any]  # M, N
    padded: bool  # whether the last block of keys is filled up with zeros
    workspace: Workspace  # memory of products, each of which is used before the next of its name is computed
    cache: dict[Any, Array] | None = None  # masks by distance, under a rule that looks at `key - query` alone


def make_grid(plan: Plan, operands: Operands, backend: Backend) -> Grid:
    """Cut the operands of a plan into blocks; where loops are traced, fill the last block up with zeros."""
    xp, loops = backend.namespace, backend.loops
    lengths = shape(operands.query, xp=xp)[-2], shape(operands.key, xp=xp)[-2]
    sizes, counts = zip(*map(_split_evenly, lengths, plan.block_sizes), strict=True)
    padded = False
    if loops.traced:
        fill = tuple(count * size - length for count, size, length in zip(counts, sizes, lengths, strict=True))
        padded = not (isinstance(fill[1], int) and fill[1] == 0)
        operands = _pad_operands(operands, fill, xp)
    relative = plan.mask is not None and unflatten(plan.mask, operands.mask).is_relative()
    relative = relative and not any(map(is_listed, operands[6:8]))
    repeats = max(sizes) % max(min(sizes), 1) == 0  # else hardly any distance occurs twice
    cache: Any = {} if relative and repeats and operands.bias is None and not loops.traced else None
    return Grid(
        plan,
        operands,
        xp,
        loops,
        sizes=sizes,
        counts=counts,
        lengths=lengths,
        padded=padded,
        workspace=Workspace(),
        cache=cache,
    )


def is_one_block(grid: Grid) -> bool:
    """Whether there is one block of keys, so that a compiler needs no loop over them."""
    return grid.loops.traced and isinstance(grid.counts[1], int) and grid.counts[1] == 1


def may_mask(grid: Grid) -> bool:
    """Whether a block may hold masked scores."""
    return grid.plan.mask is not None or grid.operands.bias is not None or grid.padded


def _split_evenly(length: Any, size: int) -> tuple[int, Any]:
    """The size of blocks of nearly equal size, and their number."""
    if not isinstance(length, int):
        return size, (length + (size - 1)) // size
    count = max(1, -(-length // size))
    return -(-length // count), count


def _pad_operands(operands: Operands, fill: tuple[Any, ...], xp: Namespace) -> Operands:
    """The operands with zeros at the end of queries and keys, to fill up the last block."""
    query, key, value, bias = operands[:4]
    if bias is not None:
        for axis, amount in ((-2, fill[0]), (-1, fill[1])):
            bias = bias if is_broadcast(bias, axis) else pad(bias, axis, amount, xp)
    return operands._replace(
        query=pad(query, -2, fill[0], xp), key=pad(key, -2, fill[1], xp), value=pad(value, -2, fill[1], xp), bias=bias
    )


def pad(x: Array, axis: int, amount: Any, xp: Namespace, number: float = 0.0) -> Array:
    """Append a number to an axis, so many times."""
    if isinstance(amount, int) and amount == 0:
        return x
    dims = list(shape(x, xp=xp))
    dims[axis] = amount
    return xp.concat([x, xp.full(tuple(dims), number, dtype=x.dtype, **on_device_of(x))], axis=axis)


def is_broadcast(x: Array, axis: int) -> bool:
    """Whether an axis has length 1 and stands for all positions."""
    dim = x.shape[axis]
    return isinstance(dim, int) and dim == 1


def _first(grid: Grid, side: int) -> Any:
    """The position of the first query or key, or the positions of all of them."""
    start = (grid.operands.query_start, grid.operands.key_start)[side]
    return grid.plan.starts[side] if start is None else grid.xp.astype(start, grid.xp.int32)


def _absolute(grid: Grid, side: int, counted: Array) -> Array:
    """The positions of queries or keys that are counted from 0; what only fills up the last block has the last."""
    xp, size, count, length = grid.xp, grid.sizes[side], grid.counts[side], grid.lengths[side]
    if not (isinstance(length, int) and size * count == length):
        counted = xp.minimum(counted, xp.add(xp.zeros_like(counted), length - 1))
    return counted_from(_first(grid, side), counted, xp)


def block_spans(grid: Grid, side: int) -> Spans:
    """The positions of all blocks of one side: of queries as a column, of keys as a row."""
    xp, size, count = grid.xp, grid.sizes[side], grid.counts[side]
    if is_listed(_first(grid, side)):
        at = _absolute(grid, side, positions(count * size, grid.operands.query, xp=xp))
        at = xp.reshape(at, (count, size))
        first, last = xp.min(at, axis=-1), xp.max(at, axis=-1)
    else:
        at, counted = None, xp.multiply(positions(count, grid.operands.query, xp=xp), size)
        first, last = (_absolute(grid, side, x) for x in (counted, xp.add(counted, size - 1)))
    if side == 0:
        first, last = xp.expand_dims(first, axis=-1), xp.expand_dims(last, axis=-1)
    return Spans(first, last, size, at)


class Sample(NamedTuple):
    """One sample of the batch, or one key/value head of it."""

    index: Any  # in the batch
    head: Any  # None for all heads
    query: Array  # (G, R, M, D)
    key: Array  # (G, N, D)
    value: Array  # (G, N, E)
    bias: Array | None
    rule: Any


def sample_at(grid: Grid, index: Any) -> Sample:
    """The arrays of one sample, or of one of its key/value heads."""
    plan, operands = grid.plan, grid.operands
    num_kv_heads = operands.key.shape[1]
    b, g = (index // num_kv_heads, index % num_kv_heads) if plan.per_head else (index, None)
    rule = None
    if plan.mask is not None:
        axes = {leaf.place: leaf.axes for leaf in leaves(plan.mask)}
        arrays = [
            array if axes[number] < 0 else sample_slice(grid, array, b, g if axes[number] == 3 else None)
            for number, array in enumerate(operands.mask)
        ]
        rule = unflatten(plan.mask, arrays)
    query, key, value = (sample_slice(grid, x, b, g) for x in operands[:3])
    bias = None if operands.bias is None else sample_slice(grid, operands.bias, b, g)
    return Sample(b, g, query, key, value=value, bias=bias, rule=rule)


def sample_slice(grid: Grid, x: Array, b: Any, g: Any) -> Array:
    """The part of an array (B or 1, G or 1, ...) for one sample, and one key/value head if that is not ``None``."""
    x = grid.loops.block_at(x, 0 if is_broadcast(x, 0) else b)
    return x if g is None or is_broadcast(x, 0) else grid.xp.expand_dims(grid.loops.block_at(x, g), axis=0)


def cached_by_distance(grid: Grid, name: str, i: Any, j: Any, like: Array, compute: Callable[[], Array]) -> Array:
    """Compute a mask of a block; only once for all blocks of one shape and distance, if the distance decides."""
    if grid.cache is None:
        return compute()
    distance = first_block(i) * grid.sizes[0] - first_block(j) * grid.sizes[1]
    key = name, distance, *like.shape[-2:]
    if key not in grid.cache:
        grid.cache[key] = compute()
    return grid.cache[key]


def first_block(index: Any) -> Any:
    """The index of a block, or of the first of a run of blocks."""
    return index.start if isinstance(index, range) else index


def block_positions(grid: Grid, sample: Sample, i: Any, j: Any, scores: Array) -> Positions:
    """Where the scores (G, R, m, n) of a block stand."""
    xp, like = grid.xp, sample.query
    num_kv_heads, group, rows, columns = shape(scores, xp=xp)
    heads = positions(num_kv_heads * group, like, xp=xp)
    if sample.head is not None:
        heads = xp.add(heads, sample.head * group)
    query, key = (
        xp.add(positions(count, like, xp=xp), first_block(index) * grid.sizes[side])
        for side, (count, index) in enumerate(((rows, i), (columns, j)))
    )
    query, key = (_absolute(grid, side, x) for side, x in enumerate((query, key)))
    batch = xp.add(xp.zeros((), dtype=xp.int32, **on_device_of(like)), sample.index)
    return Positions(batch, xp.reshape(heads, (num_kv_heads, group, 1, 1)), xp.expand_dims(query, axis=-1), key)


def dropout_of(grid: Grid) -> Dropout | None:
    """The dropout of a call, with its seed as a number or an array."""
    plan, seed = grid.plan, grid.operands.seed
    return Dropout(plan.dropout_rate, plan.seed if seed is None else seed) if plan.dropout_rate else None


def num_heads_of(grid: Grid) -> Any:
    """How many query heads there are."""
    _, num_kv_heads, group = shape(grid.operands.query, xp=grid.xp)[:3]
    return num_kv_heads * group


def num_rounds(grid: Grid) -> Any:
    """How many samples there are, or key/value heads of all of them if these are taken one by one."""
    batch, num_kv_heads = shape(grid.operands.query, xp=grid.xp)[:2]
    return batch * num_kv_heads if grid.plan.per_head else batch


def for_each_sample(grid: Grid, body: Callable[[Any, Any], Any], state: Any, *, is_shared: bool = False) -> Any:
    """Run a body for each of these rounds; in turn, if they add to the same sums."""
    if is_shared:
        return grid.loops.loop(0, num_rounds(grid), body, state)
    return grid.loops.for_each(num_rounds(grid), body, state, work_of(grid))


def work_of(grid: Grid, sample: Sample | None = None) -> int:
    """A host's work of all scores, or a sample's, by the time of one in fast arithmetic; 0 if it is not known."""
    query = (grid.operands if sample is None else sample).query
    if grid.loops.traced or not is_on_host(query):
        return 0
    *dims, _ = query.shape
    dims.append(grid.operands.key.shape[-2])
    return int(math.prod(dims)) * (EXACT_WORK if grid.plan.num_slices else 1)
