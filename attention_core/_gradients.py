"""Sums over blocks that become gradients: where they are added up, and how they are joined."""

from __future__ import annotations

from typing import Any

from attention_core._namespace import shape
from attention_core._tiles import Entry, Tiles, is_one, rounds_of, rows_of, zeros
from attention_core._typing import Array, Namespace


def gradient_stacks(tiles: Tiles, *lasts: Any, after: Array) -> tuple[Any, ...]:
    """Blocks for sums over query, key and value, of these widths, which are not needed before an array is there."""
    operands, xp, loops = tiles.operands, tiles.xp, tiles.loops
    _, groups, times = shape(operands.query, xp=xp)[:3]
    own = 1 if tiles.plan.apart else groups

    def blocks(side: int, *between: Any, last: Any) -> Any:
        def zero(index: Any) -> Array:
            size = _size_of(tiles, side, index)
            return zeros(operands.query, own, *between, size, last, xp=xp)

        return loops.stack(rounds_of(tiles) * tiles.counts[side], zero, after)

    return blocks(0, times, last=lasts[0]), blocks(1, last=lasts[1]), blocks(1, last=lasts[2])


def bias_stack(tiles: Tiles) -> Any:
    """Blocks for the gradient of a bias, or nothing where there is none."""
    operands, xp, loops = tiles.operands, tiles.xp, tiles.loops
    if operands.bias is None:
        return None
    entries, heads, sharing = shape(operands.bias, xp=xp)[:3]
    counts = [1 if is_one(operands.bias, axis) else tiles.counts[axis] for axis in (-2, -1)]
    head_count = heads if tiles.plan.apart else 1

    def zero_bias(index: Any) -> Array:
        places = index // counts[1], index
        ends = (
            1 if is_one(operands.bias, axis) else _size_of(tiles, axis, place)
            for axis, place in zip((-2, -1), places, strict=True)
        )
        return zeros(operands.query, 1 if tiles.plan.apart else heads, sharing, *ends, xp=xp)

    return loops.stack(entries * head_count * counts[0] * counts[1], zero_bias)


def _size_of(tiles: Tiles, side: int, place: Any) -> Any:
    """How long the block at a place, counted over all rounds, is."""
    if tiles.loops.traced:
        return tiles.sizes[side]
    return min(tiles.sizes[side], tiles.lengths[side] - place % tiles.counts[side] * tiles.sizes[side])


def add_bias(tiles: Tiles, entry: Entry, stack: Any, slope: Array, i: Any, j: Any) -> Any:
    bias: Any = tiles.operands.bias
    loops = tiles.loops
    rows, columns = (1 if is_one(bias, axis) else tiles.counts[axis] for axis in (-2, -1))
    place = 0 if is_one(bias, 0) else entry.index
    if entry.head is not None:
        place = place if is_one(bias, 1) else place * bias.shape[1] + entry.head
    place = place * rows + (0 if is_one(bias, -2) else i)
    place = place * columns + (0 if is_one(bias, -1) else j)
    shared = tuple(axis for axis in range(4) if is_one(bias, axis + 1))
    return loops.add(stack, place, tiles.xp.sum(slope, axis=shared, keepdims=True) if shared else slope)


def collected_bias(tiles: Tiles, stack: Any) -> Array:
    bias, xp, loops = tiles.operands.bias, tiles.xp, tiles.loops
    for axis in (-1, -2):
        stack = loops.join(stack, 1 if is_one(bias, axis) else tiles.counts[axis], axis)
    found = loops.array(stack)
    rows, columns = (1 if is_one(bias, axis) else tiles.lengths[axis] for axis in (-2, -1))
    return xp.reshape(found[..., :rows, :columns], (*shape(bias, xp=xp)[:3], rows, columns))


def transposed_product(weights: Array, x: Array, xp: Namespace) -> Array:
    """What keys collect from queries, of (G, R, m, n) and (G, R, m, D): an array (G, n, D)."""
    return xp.matmul(xp.matrix_transpose(rows_of(weights, xp)), rows_of(x, xp))
