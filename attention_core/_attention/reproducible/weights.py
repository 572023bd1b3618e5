r"""The weights of attention in reproducible arithmetic, each computed by itself.

With the reference :math:`r_i` and the power of two :math:`2^{c_i}` of `backward_reference`, a weight is
:math:`p_{ij} = 2^{256 (t_{ij} - r_i)} 2^{-c_i}`: one exponential, with a small relative error, rounded once. So the
weight of a key does not depend on how much larger that of another key is.
"""

from __future__ import annotations

from typing import Any

from attention_core._arithmetic.elementary import exp2_tail
from attention_core._arithmetic.exact import round_to_float32, to_float64, uncontracted
from attention_core._arrays import Array, Arrays, positions, shape, zeros_with
from attention_core._attention.blocks.grid import make_grid
from attention_core._attention.blocks.plan import Plan, unpack_operands
from attention_core._attention.call import Call
from attention_core._attention.reproducible.backward import backward
from attention_core._attention.reproducible.forward import arrange
from attention_core._attention.reproducible.reduction import QueryRows, for_each_rows, scores_at
from attention_core._attention.reproducible.slices import from_three_float32, pad_rows
from attention_core._backend import Backend, Operation, register


def reproducible_weights(call: Call, reference: Array) -> Array:
    """Weights before dropout, (..., H, M, N) in float32; ``reference`` is the third result of the forward pass."""
    xp = call.xp
    *leading, heads, rows, _ = shape(call.query, xp=xp)
    plan, arrays = arrange(call._replace(value=call.key, dropout=None))
    (weights,) = call.backend.custom_gradient(WEIGHTS, plan, (*arrays, call.backend.stop_gradient(reference)))
    return xp.reshape(weights, (*leading, heads, rows, shape(call.key, xp=xp)[-2]))


def _forward(plan: Plan, arrays: Arrays, backend: Backend) -> Arrays:
    grid = make_grid(plan, unpack_operands(plan, arrays[:-1]), backend)
    xp, loops = grid.xp, grid.loops
    references = pad_rows(grid, to_float64(arrays[-1], xp))

    def weigh(rows: QueryRows, _: None) -> Arrays:
        reference = rows.block_of(references)

        def add_keys(masked: bool, j: Any, blocks: Any) -> Any:
            exponents = xp.subtract(scores_at(rows, masked, j).scores, from_three_float32(reference[..., :3], xp))
            weights = uncontracted(xp.multiply(exp2_tail(exponents, xp), reference[..., 3:]), xp)
            return loops.add_block(blocks, j, round_to_float32(weights, xp))

        blocks = rows.visit(add_keys, _zero_weights(rows))
        return (loops.block_at(loops.stack_blocks(loops.concat_blocks(blocks, grid.counts[1], -1)), 0),)

    last = grid.counts[1] * grid.sizes[1] if loops.traced else grid.lengths[1]
    (weights,) = for_each_rows(grid, weigh, grid.row_stacks(last))
    return (weights[..., : grid.lengths[1]],)


def _zero_weights(rows: QueryRows) -> Any:
    """Blocks of keys whose weights are all 0."""
    grid = rows.grid
    *dims, _ = shape(rows.query, xp=grid.xp)

    def zero(j: Any) -> Array:
        size = grid.sizes[1] if grid.loops.traced else min(grid.sizes[1], grid.lengths[1] - j * grid.sizes[1])
        return zeros_with(grid.operands.query, *dims, size, xp=grid.xp)

    return grid.loops.zero_blocks(grid.counts[1], zero)


def _backward(
    plan: Plan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend
) -> tuple[Array | None, ...]:
    """The gradients of attention whose values are the unit vectors: their averages are the weights."""
    xp, (query, key, value, *others, reference) = backend.namespace, arrays
    units = _unit_vectors(key, backend)
    logsumexp = zeros_with(results[0], *shape(results[0], xp=xp)[:-1], xp=xp)
    of_weights = (results[0], logsumexp, reference), (cotangents[0], logsumexp)
    d_query, d_key, _, *rest = backward(plan, (query, key, units, *others), *of_weights, backend)
    zeros = (zeros_with(x, *shape(x, xp=xp), xp=xp) for x in (value, reference))
    return d_query, d_key, next(zeros), *rest, next(zeros)


def _unit_vectors(key: Array, backend: Backend) -> Array:
    """Values (B, G, N, N), one unit vector for each key."""
    xp = backend.namespace
    *leading, columns, _ = shape(key, xp=xp)
    indices = positions(columns, key, xp=xp)
    units = xp.astype(xp.equal(xp.expand_dims(indices, axis=-1), indices), key.dtype)
    return xp.broadcast_to(units, (*leading, columns, columns))


def _abstract(plan: Plan, arrays: Arrays, backend: Backend) -> Arrays:
    xp, operands = backend.namespace, unpack_operands(plan, arrays)
    return (zeros_with(operands.query, *shape(operands.query, xp=xp)[:-1], shape(operands.key, xp=xp)[-2], xp=xp),)


WEIGHTS = register("reproducible.weights", Operation(_forward, _backward, _abstract, needs_float64=True))
