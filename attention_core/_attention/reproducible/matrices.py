"""All scores and all weights of attention in reproducible arithmetic, a block of queries at a time, rounded once."""

from __future__ import annotations

import functools
import math
from typing import Any

from ..._arithmetic.elementary import exp2
from ..._arithmetic.exact import largest_magnitude, round_to_float32, to_float64, uncontracted
from ..._arithmetic.products import exact_sum
from ..._arrays import Array, Arrays, Gradients, positions, shape, sizes, take_rows, zeros_with
from ..._backend import Backend, Operation, register
from ..blocks.grid import (
    Grid,
    Sample,
    is_broadcast,
    make_grid,
    zero_unless_finite,
)
from ..blocks.plan import Plan, as_called, unpack
from ..blocks.visits import QueryRows, for_each_rows
from ..call import Call, flatten_group
from . import bounds
from .backward import backward
from .bounds import Reference, Terms, settle
from .forward import arrange
from .scores import ScoreBlock, cut_vectors, exact_block, pad_rows, unpack_logarithm

Slices = list[list[Array]]


def _cut(grid: Grid, sample: Sample) -> Slices:
    """Queries and keys of a sample in slices."""
    return [cut_vectors(to_float64(x, grid.xp), grid.xp) for x in (sample.query, sample.key)]


def _scores_at(rows: QueryRows, cut: Slices, masked: bool, j: Any) -> tuple[Array, ScoreBlock]:
    """The exact scores of a block of queries and the block of keys at ``j``, in units of log 2."""
    query, key = map(rows.block, cut[0]), (rows.grid.loops.block(x, j, rows.grid.sizes[1], -2) for x in cut[1])
    return exact_block(rows.grid, rows.sample, list(query), list(key), i=rows.i, j=j, masked=masked)


def _grid_of(plan: Plan, arrays: Arrays, backend: Backend) -> Grid:
    """A grid with one block of keys."""
    call = unpack(plan, arrays, backend)
    return make_grid(plan._replace(block_sizes=(plan.block_sizes[0], _num_keys(call))), call)


def _num_keys(call: Call) -> int:
    """The width of a matrix of scores or weights."""
    if (columns := sizes(call.key)[-2]) is None:
        raise ValueError("expected a known number of keys with arithmetic='reproducible'; got an unknown one")
    return columns


def _matrix(operation: Operation, call: Call, *others: Array) -> Array:
    """A matrix (..., H, M, N) in float32, by an operation on the arrays of a call and others."""
    columns, (plan, arrays) = _num_keys(call), arrange(call)
    (matrix,) = call.backend.custom_gradient(operation, plan, (*arrays, *others))
    return as_called(call, columns, matrix)[0]


def reproducible_scores(call: Call) -> Array:
    """Scores (..., H, M, N) in float32, masked with -inf."""
    return _matrix(SCORES, call)


def _scores_forward(plan: Plan, arrays: Arrays, backend: Backend) -> Arrays:
    grid = _grid_of(plan, arrays, backend)

    def round_scores(rows: QueryRows, cut: Slices) -> Arrays:
        _, block = _scores_at(rows, cut, grid.may_mask, 0)
        return (round_to_float32(block.scores, grid.xp),)

    return for_each_rows(grid, functools.partial(_cut, grid), round_scores, grid.row_stacks(grid.lengths[1]))


def _scores_backward(plan: Plan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend) -> Gradients:
    call, xp = unpack(plan, arrays, backend), backend.namespace
    grid = _grid_of(plan, arrays, backend)
    d_scores = to_float64(xp.where(xp.equal(results[0], -math.inf), 0.0, cotangents[0]), xp)
    d_bias = () if call.bias is None else (_d_bias(grid, call.bias, d_scores),)
    if call.softcap is not None:
        d_scores = _before_softcap(grid, d_scores)
    d_query, d_key = _d_query_and_key(grid, d_scores)
    if not grid.all_finite:
        d_query = zero_unless_finite(d_query, call.query, xp)
        d_key = zero_unless_finite(d_key, call.key, xp)
    d_value = zeros_with(call.value, *shape(call.value, xp=xp), xp=xp)
    gradients = d_query, d_key, d_value, *d_bias
    return *gradients, *[None] * (len(arrays) - len(gradients))


def _d_bias(grid: Grid, bias: Array, d_scores: Array) -> Array:
    shared = tuple(axis for axis in range(5) if is_broadcast(bias, axis))
    return round_to_float32(exact_sum(d_scores, shared, xp=grid.xp) if shared else d_scores, grid.xp)


def _before_softcap(grid: Grid, d_scores: Array) -> Array:
    """The gradient of the scores before the softcap, which are computed again."""
    xp = grid.xp
    padded = pad_rows(grid, d_scores)

    def multiply_derivative(rows: QueryRows, cut: Slices) -> Arrays:
        _, block = _scores_at(rows, cut, grid.may_mask, 0)
        return (uncontracted(xp.multiply(block.softcap_derivative, rows.block_of(padded)), xp),)

    stacks = grid.row_stacks(grid.lengths[1], dtype="float64")
    return for_each_rows(grid, functools.partial(_cut, grid), multiply_derivative, stacks)[0]


def _d_query_and_key(grid: Grid, d_scores: Array) -> list[Array]:
    """Products of the gradient of scores, (B, G, R, M, N), with keys and with queries, by the filter of `backward`."""
    xp, scale = grid.xp, grid.call.scale
    query, key = (
        to_float64(grid.finite_or_zero(x), xp)[..., :length, :]
        for x, length in zip(grid.call[:2], grid.lengths, strict=True)
    )
    whole = grid._replace(sizes=grid.lengths, counts=(1, 1))

    def turned(weights: Array, side: int) -> Array:
        """Weights as matrices whose rows are queries (side 0) of a group, or keys."""
        flat = flatten_group(weights, xp=xp)
        return flat if side == 0 else xp.matrix_transpose(flat)

    def gradient(side: int, vectors: Array) -> Array:
        like = (query, key)[side]

        def product(weights: Array, vectors: Array) -> Array:
            found = xp.matmul(turned(weights, side), vectors)
            return xp.reshape(found, (*shape(like, xp=xp)[:-1], shape(vectors, xp=xp)[-1]))

        largest = largest_magnitude(vectors, -1, xp)
        bound = xp.multiply(product(xp.abs(d_scores), largest), bounds.sum_error(whole, 1 - side))
        bound = xp.add(xp.multiply(bound, bounds.SLACK * abs(scale)), bounds.TINY)
        found = bounds.decided(xp.multiply(product(d_scores, vectors), scale), bound, round_to_float32, xp)

        def reference(sample: Sample) -> Reference:
            weights, columns = (grid.part_of(x, sample.index, sample.head) for x in (d_scores, vectors))

            def of_rows(picked: Array) -> tuple[list[Terms], list[Array]]:
                taken = turned(take_rows(weights, picked, axis=side - 2, xp=xp), side)
                return [Terms(taken, columns, xp.full_like(taken[..., :1], scale))], []

            return of_rows

        return settle(grid, side, (found,), reference)[0]

    return [gradient(0, key), gradient(1, flatten_group(query, xp=xp))]


def _abstract(plan: Plan, arrays: Arrays, backend: Backend) -> Arrays:
    xp, (query, key) = backend.namespace, arrays[:2]
    return (zeros_with(query, *shape(query, xp=xp)[:-1], shape(key, xp=xp)[-2], xp=xp),)


SCORES = register("reproducible.scores", Operation(_scores_forward, _scores_backward, _abstract, needs_float64=True))


def reproducible_weights(call: Call, reference: Array) -> Array:
    """Weights before dropout, (..., H, M, N) in float32; ``reference`` is the third result of the forward pass."""
    return _matrix(WEIGHTS, call._replace(value=call.key, dropout=None), call.backend.stop_gradient(reference))


def _weights_forward(plan: Plan, arrays: Arrays, backend: Backend) -> Arrays:
    grid = make_grid(plan, unpack(plan, arrays[:-1], backend))
    xp, loops = grid.xp, grid.loops
    references = pad_rows(grid, to_float64(arrays[-1], xp))

    def weigh(rows: QueryRows, cut: Slices) -> Arrays:
        anchor, logarithm = unpack_logarithm(rows.block_of(references), xp)

        def add_keys(masked: bool, j: Any, blocks: Any) -> Any:
            scores, _ = _scores_at(rows, cut, masked, j)
            exponents = xp.subtract(xp.subtract(scores, anchor), logarithm)
            return loops.add_block(blocks, j, round_to_float32(exp2(exponents, xp), xp))

        blocks = rows.visit(add_keys, loops.zero_blocks(grid.counts[1], functools.partial(_zeros, rows)))
        return (loops.block_at(loops.stack_blocks(loops.concat_blocks(blocks, grid.counts[1], -1)), 0),)

    last = grid.counts[1] * grid.sizes[1] if loops.traced else grid.lengths[1]
    (weights,) = for_each_rows(grid, functools.partial(_cut, grid), weigh, grid.row_stacks(last))
    return (weights[..., : grid.lengths[1]],)


def _zeros(rows: QueryRows, j: Any) -> Array:
    """The weights of a block of keys to which nobody attends."""
    *dims, _ = shape(rows.block(rows.sample.query), xp=rows.grid.xp)
    return zeros_with(rows.grid.call.query, *dims, rows.grid.length_of_block(1, j), xp=rows.grid.xp)


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
