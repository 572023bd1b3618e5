"""Sums over blocks that become gradients: where they are added up, and how they are joined."""

from __future__ import annotations

from typing import Any

from attention_core._arrays import Array, Namespace, shape, zeros_with
from attention_core._attention.blocks.grid import BatchEntry, Grid, is_broadcast, num_rounds
from attention_core._attention.blocks.scores import fold_group


def gradient_accumulators(tiles: Grid, *lasts: Any, after: Array) -> tuple[Any, ...]:
    """Blocks for sums over query, key and value, of these widths, which are not needed before an array is there."""
    operands, xp, loops = tiles.operands, tiles.xp, tiles.loops
    _, groups, times = shape(operands.query, xp=xp)[:3]
    own = 1 if tiles.plan.per_head else groups

    def blocks(side: int, *between: Any, last: Any) -> Any:
        def zero(index: Any) -> Array:
            size = _block_length(tiles, side, index)
            return zeros_with(operands.query, own, *between, size, last, xp=xp)

        return loops.zero_blocks(num_rounds(tiles) * tiles.counts[side], zero, after)

    return blocks(0, times, last=lasts[0]), blocks(1, last=lasts[1]), blocks(1, last=lasts[2])


def bias_accumulator(tiles: Grid) -> Any:
    """Blocks for the gradient of a bias, or nothing where there is none."""
    operands, xp, loops = tiles.operands, tiles.xp, tiles.loops
    if operands.bias is None:
        return None
    entries, heads, sharing = shape(operands.bias, xp=xp)[:3]
    counts = [1 if is_broadcast(operands.bias, axis) else tiles.counts[axis] for axis in (-2, -1)]
    head_count = heads if tiles.plan.per_head else 1

    def zero_bias(index: Any) -> Array:
        places = index // counts[1], index
        ends = (
            1 if is_broadcast(operands.bias, axis) else _block_length(tiles, axis, place)
            for axis, place in zip((-2, -1), places, strict=True)
        )
        return zeros_with(operands.query, 1 if tiles.plan.per_head else heads, sharing, *ends, xp=xp)

    return loops.zero_blocks(entries * head_count * counts[0] * counts[1], zero_bias)


def _block_length(tiles: Grid, side: int, place: Any) -> Any:
    """How long the block at a place, counted over all rounds, is."""
    if tiles.loops.traced:
        return tiles.sizes[side]
    return min(tiles.sizes[side], tiles.lengths[side] - place % tiles.counts[side] * tiles.sizes[side])


def add_bias_gradient(tiles: Grid, entry: BatchEntry, stack: Any, slope: Array, i: Any, j: Any) -> Any:
    bias: Any = tiles.operands.bias
    loops = tiles.loops
    rows, columns = (1 if is_broadcast(bias, axis) else tiles.counts[axis] for axis in (-2, -1))
    place = 0 if is_broadcast(bias, 0) else entry.index
    if entry.head is not None:
        place = place if is_broadcast(bias, 1) else place * bias.shape[1] + entry.head
    place = place * rows + (0 if is_broadcast(bias, -2) else i)
    place = place * columns + (0 if is_broadcast(bias, -1) else j)
    shared = tuple(axis for axis in range(4) if is_broadcast(bias, axis + 1))
    return loops.add_block(stack, place, tiles.xp.sum(slope, axis=shared, keepdims=True) if shared else slope)


def concat_bias_gradient(tiles: Grid, stack: Any) -> Array:
    bias, xp, loops = tiles.operands.bias, tiles.xp, tiles.loops
    for axis in (-1, -2):
        stack = loops.concat_blocks(stack, 1 if is_broadcast(bias, axis) else tiles.counts[axis], axis)
    found = loops.stack_blocks(stack)
    rows, columns = (1 if is_broadcast(bias, axis) else tiles.lengths[axis] for axis in (-2, -1))
    return xp.reshape(found[..., :rows, :columns], (*shape(bias, xp=xp)[:3], rows, columns))


def matmul_transposed(weights: Array, x: Array, xp: Namespace) -> Array:
    """What keys collect from queries, of (G, R, m, n) and (G, R, m, D): an array (G, n, D)."""
    return xp.matmul(xp.matrix_transpose(fold_group(weights, xp)), fold_group(x, xp))


def concat_blocks(tiles: Grid, stack: Any, side: int) -> Array:
    """The blocks of queries or keys (axis -2) as one array (B, G, ..., length, width)."""
    xp, loops = tiles.xp, tiles.loops
    found = loops.stack_blocks(loops.concat_blocks(stack, tiles.counts[side], -2))[..., : tiles.lengths[side], :]
    entries, groups = shape(tiles.operands.query, xp=xp)[:2]
    return xp.reshape(found, (entries, groups, *shape(found, xp=xp)[2:]))
