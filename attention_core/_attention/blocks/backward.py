r"""The backward pass over blocks, as in FlashAttention-2.

The weights P are computed once more from the logsumexp L. With dO the gradient of the output, dL that of the logsumexp,
and D the row sums of dO * O, less dL,

.. math:: P = e^{S - L}, \qquad dV = P^\top dO, \qquad dP = dO\, V^\top, \qquad dS = P \circ (dP - D), \qquad
          dQ = dS\, K, \qquad dK = dS^\top Q.

These are ``weights``, ``d_value``, ``d_weights``, ``d_scores``, ``d_query`` and ``d_key``; D is ``delta``. Q is scaled
already: the operation is given the scaled query (`plan.make_plan`), so that the library differentiates the scale.

The exact logsumexp is L + r, with a remainder r that rounding took. In a row of large scores, r may be the logarithm
of the number of keys. Each row of P so has a factor of :math:`e^{-r}`, by which dO and D are multiplied.

References
----------
T. Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from ..._arrays import Array, Arrays, Gradients, cast_to, shape, upcast
from ..._backend import Backend, can_be_read
from ..call import Call
from ..facts import is_clean
from .grid import Grid, Sample, make_grid, matmul_per_group, matmul_transposed, zero_unless_finite
from .plan import Plan, block_tuning, pack, pad, unpack
from .visits import ScoreBlock, for_each_keys, modified_scores, score_block, score_variables


def backward(plan: Plan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend) -> Gradients:
    """The gradient for each array, given those for output and logsumexp; ``None`` for integers and booleans.

    Nothing depends on the third result, the remainder of the logsumexp, but this.
    """
    call, (queries, keys) = unpack(plan, arrays, backend), plan.block_sizes
    plan = plan._replace(block_sizes=(queries, min(keys, block_tuning(call).backward_keys)))
    grid = make_grid(plan, call)
    if not grid.all_finite and can_be_read(*arrays[:3], cotangents[0]):
        gradients = _gradients(grid._replace(all_finite=True), call, results, cotangents)
        if all(bool(is_clean(each, backend.namespace)) for each in gradients if each is not None):
            return gradients
    return _gradients(grid, call, results, cotangents)


def _gradients(grid: Grid, call: Call, results: Arrays, cotangents: Arrays) -> Gradients:
    d_query, d_key, d_value, d_bias, d_variables = _accumulate(grid, _row_arrays(grid, results, cotangents))
    gradients = [*grid.concat_blocks((d_query,), 0), *grid.concat_blocks((d_key, d_value), 1)]
    if not grid.all_finite:  # elements that are not finite were replaced, and have no gradient
        gradients = [zero_unless_finite(x, like, grid.xp) for x, like in zip(gradients, call[:3], strict=True)]
    if call.bias is not None:
        gradients.append(grid.concat_bias_gradient(d_bias))
    variables, arrays = score_variables(call), pack(call)[1]
    rounded = iter([cast_to(d, x.dtype, xp=grid.xp) for d, x in zip(d_variables, variables, strict=True)])
    others = arrays[len(gradients) :]  # of cap and score modification, and those that have no gradient
    return *gradients, *(next(rounded) if any(x is each for each in variables) else None for x in others)


class RowArrays(NamedTuple):
    """Of each query: the gradient of its output and delta, times the factor of its weights, and logsumexp."""

    d_output: Array
    delta: Array
    logsumexp: Array


def _row_arrays(grid: Grid, results: tuple[Array, Array, Array], cotangents: tuple[Array, Array, Array]) -> RowArrays:
    xp, (output, logsumexp, remainder), (d_output, d_logsumexp, _) = grid.xp, results, cotangents
    delta = xp.expand_dims(xp.subtract(xp.vecdot(d_output, output), d_logsumexp), axis=-1)
    factor = xp.expand_dims(xp.exp(xp.negative(remainder)), axis=-1)
    d_output, delta = xp.multiply(d_output, factor), xp.multiply(delta, factor)
    logsumexp = xp.where(xp.equal(logsumexp, -math.inf), 0.0, logsumexp)  # -inf - -inf would be NaN
    logsumexp = xp.expand_dims(logsumexp, axis=-1)
    amount = shape(grid.call.query, xp=xp)[-2] - grid.lengths[0]
    # Rows that only fill up a block have no weights, whatever their scores.
    return RowArrays(
        pad(d_output, -2, amount, xp), pad(delta, -2, amount, xp), pad(logsumexp, -2, amount, xp, number=math.inf)
    )


def _accumulate(grid: Grid, rows: RowArrays) -> tuple[Any, ...]:
    """Gradients as sums: stacks of those of query, key, value and bias, and those of `score_variables`."""
    xp = grid.xp
    depth = shape(grid.call.key, xp=xp)[-1]
    variables = upcast(score_variables(grid.call), xp=xp) if grid.changes_scores else ()
    stacks, d_bias = grid.gradient_stacks(depth, depth, grid.width, after=rows.delta), grid.bias_stack()
    sums = *stacks, d_bias, tuple(xp.zeros_like(x) for x in variables)

    def of_sample(sample: Sample) -> tuple[list[Array], Arrays]:
        of_rows = [grid.part_of(x, sample.index, sample.head) for x in rows]
        return [sample.query, *of_rows], (sample.key, sample.value)

    add, is_shared = functools.partial(_add_block, grid), d_bias is not None or bool(variables)
    return for_each_keys(grid, of_sample, add, sums, is_shared=is_shared)  # type: ignore[no-any-return]


def _add_block(
    grid: Grid,
    sample: Sample,
    of_rows: list[Array],
    of_keys: Arrays,
    j: Any,
    masked: bool,
    i: Any,
    sums: tuple[Any, ...],
) -> tuple[Any, ...]:
    """The gradients with those of one block of scores: of some queries and their `RowArrays`, and some keys."""
    xp, loops, (d_query, d_key, d_value, d_bias, d_variables) = grid.xp, grid.loops, sums
    queries, d_output, delta, logsumexp = (loops.block(x, i, grid.sizes[0], -2) for x in of_rows)
    keys, values = of_keys
    keys_t, values_t = xp.matrix_transpose(keys), xp.matrix_transpose(grid.finite_or_zero(values))
    block = score_block(grid, sample, queries, keys_t, i=i, j=j, masked=masked)
    # A masked value may make something that is not finite, which the gradient of a bias would show.
    masks_again = block.allowed is not None and (not grid.all_finite or grid.call.bias is not None)
    weights = loops.exp_difference(block.scores, logsumexp)
    if masks_again:
        weights = xp.where(block.allowed, weights, 0.0)  # even those of a query that is NaN
    at_queries, at_keys = (sample.round * count + index for count, index in zip(grid.counts, (i, j), strict=True))
    d_value = loops.add_block(d_value, at_keys, matmul_transposed(_drop(grid, block, weights), d_output, xp))
    d_weights = _drop(grid, block, matmul_per_group(d_output, values_t, xp))
    d_scores = loops.inplace(xp.subtract, d_weights, delta)
    d_scores = loops.inplace(xp.multiply, d_scores, weights)
    if masks_again:
        d_scores = xp.where(block.allowed, d_scores, 0.0)  # even if a masked value made it overflow
    if d_bias is not None:
        d_bias = grid.add_bias_gradient(sample, d_bias, d_scores, i, j=j)
    if grid.changes_scores:
        d_scores, d_variables = _through_modification(grid, block, d_scores, d_variables)
    d_query = loops.add_block(d_query, at_queries, matmul_per_group(d_scores, grid.finite_or_zero(keys), xp))
    d_key = loops.add_block(d_key, at_keys, matmul_transposed(d_scores, grid.finite_or_zero(queries), xp))
    return d_query, d_key, d_value, d_bias, d_variables


def _drop(grid: Grid, block: ScoreBlock, x: Array) -> Array:
    """Weights, or their gradients, after dropout."""
    return x if grid.call.dropout is None else grid.xp.multiply(grid.drop(x, block.at), grid.call.dropout.scale)


def _through_modification(grid: Grid, block: ScoreBlock, d_scores: Array, d_variables: Arrays) -> tuple[Array, Arrays]:
    """The gradient of scores before cap and score modification, and the sums of those of what these depend on."""
    xp = grid.xp

    def modified(raw: Array, *variables: Array) -> Array:
        return modified_scores(grid, raw, variables, block.at)

    _, pullback = grid.call.backend.vjp(modified, block.raw, *score_variables(grid.call))
    d_raw, *more = pullback(d_scores)
    d_raw = xp.where(xp.equal(d_scores, 0.0), 0.0, d_raw)  # even where the modification has no finite derivative
    return d_raw, tuple(map(xp.add, d_variables, upcast(tuple(more), xp=xp)))
