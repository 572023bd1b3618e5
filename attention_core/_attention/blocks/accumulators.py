"""Stacks of blocks in which gradients are summed, and how they become arrays."""

from __future__ import annotations

from typing import Any

from attention_core._arrays import Array, Namespace, on_device_of, shape, zeros_with
from attention_core._attention.blocks.grid import Grid, Sample, is_broadcast, num_rounds
from attention_core._attention.call import flatten_group


def row_accumulators(grid: Grid, *lasts: Any, dtype: str | None = None) -> tuple[Any, ...]:
    """Blocks of queries, (G, R, m, last) each, that start as zero: a stack for each of these widths.

    By default they have the dtype of the queries.
    """
    query, xp = grid.operands.query, grid.xp
    _, num_kv_heads, group = shape(query, xp=xp)[:3]
    dims = (1 if grid.plan.per_head else num_kv_heads, group, grid.sizes[0])
    options = {"dtype": query.dtype if dtype is None else getattr(xp, dtype), **on_device_of(query)}

    def blocks(last: Any) -> Any:
        count = num_rounds(grid) * grid.counts[0]
        return grid.loops.zero_blocks(count, lambda _: xp.zeros((*dims, last), **options))

    return tuple(map(blocks, lasts))


def gradient_accumulators(grid: Grid, *lasts: Any, after: Array) -> tuple[Any, ...]:
    """Blocks for the gradients of query, key and value, of these widths. Memory is needed once ``after`` is there."""
    operands, xp, loops = grid.operands, grid.xp, grid.loops
    _, num_kv_heads, group = shape(operands.query, xp=xp)[:3]
    num_heads = 1 if grid.plan.per_head else num_kv_heads

    def blocks(side: int, *between: Any, last: Any) -> Any:
        def zero(index: Any) -> Array:
            size = _block_length(grid, side, index)
            return zeros_with(operands.query, num_heads, *between, size, last, xp=xp)

        return loops.zero_blocks(num_rounds(grid) * grid.counts[side], zero, after)

    return blocks(0, group, last=lasts[0]), blocks(1, last=lasts[1]), blocks(1, last=lasts[2])


def bias_accumulator(grid: Grid) -> Any:
    """Blocks for the gradient of a bias; ``None`` where there is none."""
    operands, xp, loops = grid.operands, grid.xp, grid.loops
    if operands.bias is None:
        return None
    batch, heads, sharing = shape(operands.bias, xp=xp)[:3]
    counts = [1 if is_broadcast(operands.bias, axis) else grid.counts[axis] for axis in (-2, -1)]
    head_count = heads if grid.plan.per_head else 1

    def zero_bias(index: Any) -> Array:
        places = index // counts[1], index
        ends = (
            1 if is_broadcast(operands.bias, axis) else _block_length(grid, axis, axis_index)
            for axis, axis_index in zip((-2, -1), places, strict=True)
        )
        return zeros_with(operands.query, 1 if grid.plan.per_head else heads, sharing, *ends, xp=xp)

    return loops.zero_blocks(batch * head_count * counts[0] * counts[1], zero_bias)


def _block_length(grid: Grid, side: int, index: Any) -> Any:
    """How long a block is, by its index over all rounds."""
    if grid.loops.traced:
        return grid.sizes[side]
    return min(grid.sizes[side], grid.lengths[side] - index % grid.counts[side] * grid.sizes[side])


def add_bias_gradient(grid: Grid, sample: Sample, stack: Any, d_scores: Array, i: Any, j: Any) -> Any:
    """Add the gradient of a block of scores to that of the bias, summed over what the bias is broadcast to."""
    bias: Any = grid.operands.bias
    loops = grid.loops
    rows, columns = (1 if is_broadcast(bias, axis) else grid.counts[axis] for axis in (-2, -1))
    index = 0 if is_broadcast(bias, 0) else sample.index
    if sample.head is not None:
        index = index if is_broadcast(bias, 1) else index * bias.shape[1] + sample.head
    index = index * rows + (0 if is_broadcast(bias, -2) else i)
    index = index * columns + (0 if is_broadcast(bias, -1) else j)
    shared = tuple(axis for axis in range(4) if is_broadcast(bias, axis + 1))
    return loops.add_block(stack, index, grid.xp.sum(d_scores, axis=shared, keepdims=True) if shared else d_scores)


def concat_bias_gradient(grid: Grid, stack: Any) -> Array:
    """The gradient of the bias as one array of its shape."""
    bias, xp, loops = grid.operands.bias, grid.xp, grid.loops
    for axis in (-1, -2):
        stack = loops.concat_blocks(stack, 1 if is_broadcast(bias, axis) else grid.counts[axis], axis)
    d_bias = loops.stack_blocks(stack)
    rows, columns = (1 if is_broadcast(bias, axis) else grid.lengths[axis] for axis in (-2, -1))
    return xp.reshape(d_bias[..., :rows, :columns], (*shape(bias, xp=xp)[:3], rows, columns))


def matmul_transposed(weights: Array, x: Array, xp: Namespace) -> Array:
    """Sums over queries, of weights (G, R, m, n) and vectors (G, R, m, D): an array (G, n, D)."""
    return xp.matmul(xp.matrix_transpose(flatten_group(weights, xp=xp)), flatten_group(x, xp=xp))


def concat_blocks(grid: Grid, stack: Any, side: int) -> Array:
    """The blocks of queries or keys (axis -2) as one array (B, G, ..., length, width)."""
    xp, loops = grid.xp, grid.loops
    rows = loops.stack_blocks(loops.concat_blocks(stack, grid.counts[side], -2))[..., : grid.lengths[side], :]
    batch, num_kv_heads = shape(grid.operands.query, xp=xp)[:2]
    return xp.reshape(rows, (batch, num_kv_heads, *shape(rows, xp=xp)[2:]))
