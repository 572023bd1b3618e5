r"""All scores and all weights of attention in reproducible arithmetic, a block of queries at a time, rounded once.

With the reference :math:`r_i` and the power of two :math:`2^{c_i}` of `backward_reference`, a weight is
:math:`p_{ij} = 2^{256 (t_{ij} - r_i)} 2^{-c_i}`: one exponential, with a small relative error. So the weight of a key
does not depend on how much larger that of another key is.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from attention_core._arithmetic.elementary import exp2_tail
from attention_core._arithmetic.exact import from_three_float32, round_to_float32, to_float64, uncontracted
from attention_core._arithmetic.products import exact_sum, matmul
from attention_core._arrays import Array, Arrays, Gradients, positions, shape, zeros_with
from attention_core._attention.blocks.grid import Grid, is_broadcast, make_grid
from attention_core._attention.blocks.nonfinite import zero_unless_finite
from attention_core._attention.blocks.plan import Operands, Plan, unpack_operands
from attention_core._attention.call import Call, flatten_group
from attention_core._attention.reproducible.backward import backward
from attention_core._attention.reproducible.forward import arrange
from attention_core._attention.reproducible.reduction import QueryRows, for_each_rows, scores_at
from attention_core._attention.reproducible.slices import SCORE_UNIT, pad_rows
from attention_core._backend import Backend, Operation, register


def reproducible_scores(call: Call) -> Array:
    """Scores (..., H, M, N) in float32, masked with -inf."""
    xp = call.xp
    *leading, heads, rows, _ = shape(call.query, xp=xp)
    columns = shape(call.key, xp=xp)[-2]
    if not isinstance(columns, int):
        raise ValueError("expected a known number of keys with arithmetic='reproducible'; got an unknown one")
    plan, arrays = arrange(call)
    (scores,) = call.backend.custom_gradient(SCORES, plan._replace(block_sizes=(plan.block_sizes[0], columns)), arrays)
    return xp.reshape(scores, (*leading, heads, rows, columns))


def _scores_forward(plan: Plan, arrays: Arrays, backend: Backend) -> Arrays:
    grid = make_grid(plan, unpack_operands(plan, arrays), backend)
    xp = grid.xp

    def round_scores(rows: QueryRows, _: None) -> Arrays:
        scores = scores_at(rows, grid.may_mask, 0).scores
        return (round_to_float32(uncontracted(xp.multiply(scores, 1 / SCORE_UNIT), xp), xp),)

    return for_each_rows(grid, round_scores, grid.row_stacks(grid.lengths[1]))


def _scores_backward(plan: Plan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend) -> Gradients:
    operands, xp = unpack_operands(plan, arrays), backend.namespace
    grid = make_grid(plan, operands, backend)
    d_scores = to_float64(xp.where(xp.equal(results[0], -math.inf), 0.0, cotangents[0]), xp)
    d_bias = () if operands.bias is None else (_d_bias(grid, operands.bias, d_scores),)
    if plan.softcap is not None:
        d_scores = _before_softcap(grid, d_scores)
    d_value = zeros_with(operands.value, *shape(operands.value, xp=xp), xp=xp)
    integers = (None for _ in range(plan.num_integers))
    return *_d_query_and_key(grid, operands, d_scores), d_value, *d_bias, *integers


def _d_bias(grid: Grid, bias: Array, d_scores: Array) -> Array:
    shared = tuple(axis for axis in range(5) if is_broadcast(bias, axis))
    return round_to_float32(exact_sum(d_scores, shared, xp=grid.xp) if shared else d_scores, grid.xp)


def _before_softcap(grid: Grid, d_scores: Array) -> Array:
    """The gradient of the scores before the softcap, which are computed again."""
    xp = grid.xp
    padded = pad_rows(grid, d_scores)

    def multiply_derivative(rows: QueryRows, _: None) -> Arrays:
        return (xp.multiply(scores_at(rows, grid.may_mask, 0).softcap_derivative, rows.block_of(padded)),)

    (product,) = for_each_rows(grid, multiply_derivative, grid.row_stacks(grid.lengths[1], dtype="float64"))
    return product


def _d_query_and_key(grid: Grid, operands: Operands, d_scores: Array) -> tuple[Array, Array]:
    plan, xp = grid.plan, grid.xp
    query, key = (to_float64(grid.finite_or_zero(x), xp) for x in operands[:2])
    grouped = flatten_group(d_scores, xp=xp)
    d_query = xp.reshape(matmul(grouped, key, xp=xp), shape(query, xp=xp))
    d_key = matmul(xp.matrix_transpose(grouped), flatten_group(query, xp=xp), xp=xp)
    d_query, d_key = (
        round_to_float32(uncontracted(xp.multiply(x, plan.score_scale), xp), xp) for x in (d_query, d_key)
    )
    if plan.all_finite:
        return d_query, d_key
    return zero_unless_finite(d_query, operands.query, xp), zero_unless_finite(d_key, operands.key, xp)


def _abstract(plan: Plan, arrays: Arrays, backend: Backend) -> Arrays:
    xp, operands = backend.namespace, unpack_operands(plan, arrays)
    return (zeros_with(operands.query, *shape(operands.query, xp=xp)[:-1], shape(operands.key, xp=xp)[-2], xp=xp),)


SCORES = register("reproducible.scores", Operation(_scores_forward, _scores_backward, _abstract, needs_float64=True))


def reproducible_weights(call: Call, reference: Array) -> Array:
    """Weights before dropout, (..., H, M, N) in float32; ``reference`` is the third result of the forward pass."""
    xp = call.xp
    *leading, heads, rows, _ = shape(call.query, xp=xp)
    plan, arrays = arrange(call._replace(value=call.key, dropout=None))
    (weights,) = call.backend.custom_gradient(WEIGHTS, plan, (*arrays, call.backend.stop_gradient(reference)))
    return xp.reshape(weights, (*leading, heads, rows, shape(call.key, xp=xp)[-2]))


def _weights_forward(plan: Plan, arrays: Arrays, backend: Backend) -> Arrays:
    grid = make_grid(plan, unpack_operands(plan, arrays[:-1]), backend)
    xp, loops = grid.xp, grid.loops
    references = pad_rows(grid, to_float64(arrays[-1], xp))

    def weigh(rows: QueryRows, _: None) -> Arrays:
        reference = rows.block_of(references)

        def add_keys(masked: bool, j: Any, blocks: Any) -> Any:
            exponents = xp.subtract(scores_at(rows, masked, j).scores, from_three_float32(reference[..., :3], xp))
            weights = uncontracted(xp.multiply(exp2_tail(exponents, xp), reference[..., 3:]), xp)
            return loops.add_block(blocks, j, round_to_float32(weights, xp))

        blocks = rows.visit(add_keys, loops.zero_blocks(grid.counts[1], functools.partial(_zeros, rows)))
        return (loops.block_at(loops.stack_blocks(loops.concat_blocks(blocks, grid.counts[1], -1)), 0),)

    last = grid.counts[1] * grid.sizes[1] if loops.traced else grid.lengths[1]
    (weights,) = for_each_rows(grid, weigh, grid.row_stacks(last))
    return (weights[..., : grid.lengths[1]],)


def _zeros(rows: QueryRows, j: Any) -> Array:
    """The weights of a block of keys to which nobody attends."""
    *dims, _ = shape(rows.query, xp=rows.grid.xp)
    return zeros_with(rows.grid.operands.query, *dims, rows.grid.length_of_block(1, j), xp=rows.grid.xp)


def _weights_backward(plan: Plan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend) -> Gradients:
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


WEIGHTS = register(
    "reproducible.weights", Operation(_weights_forward, _weights_backward, _abstract, needs_float64=True)
)
