"""The scores of attention in reproducible arithmetic, rounded once: a block of queries at a time, against all keys."""

from __future__ import annotations

import math

from attention_core._arithmetic.exact import round_to_float32, to_float64, uncontracted
from attention_core._arithmetic.products import exact_sum, matmul
from attention_core._arrays import Array, Arrays, shape, zeros_with
from attention_core._attention.blocks.grid import Grid, is_broadcast, make_grid
from attention_core._attention.blocks.nonfinite import zero_unless_finite
from attention_core._attention.blocks.plan import Operands, Plan, unpack_operands
from attention_core._attention.call import Call, flatten_group
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


def _forward(plan: Plan, arrays: Arrays, backend: Backend) -> Arrays:
    grid = make_grid(plan, unpack_operands(plan, arrays), backend)
    xp = grid.xp

    def round_scores(rows: QueryRows, _: None) -> Arrays:
        scores = scores_at(rows, grid.may_mask, 0).scores
        return (round_to_float32(uncontracted(xp.multiply(scores, 1 / SCORE_UNIT), xp), xp),)

    return for_each_rows(grid, round_scores, grid.row_stacks(grid.lengths[1]))


def _backward(
    plan: Plan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend
) -> tuple[Array | None, ...]:
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


SCORES = register("reproducible.scores", Operation(_forward, _backward, _abstract, needs_float64=True))
