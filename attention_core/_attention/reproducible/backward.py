r"""The backward pass in reproducible arithmetic: gradients that are correctly rounded, by a filter as in `forward`.

In FlashAttention's notation, with the output gradient dO, and :math:`a_i` and :math:`r_i` of `pack_logarithm`,

.. math:: P_{ij} = 2^{t_{ij} - a_i - r_i}, \quad dP = dO\, V^T, \quad D_i = \sum_e dO_{ie} O_{ie} - d\ell_i,
    \quad dS = P \circ (dP - D), \quad dV = P^T dO, \quad dQ = \sigma\, dS\, K, \quad dK = \sigma\, dS^T Q,

where :math:`d\ell` is the gradient of the logsumexp. The reference takes exact scores, exact dP, and exact sums of the
products. So the bits of a row of dQ depend on the query and on what it may attend to. Those of dK and dV depend on the
key, its value, and the queries that may attend to it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..._arithmetic.elementary import exp2
from ..._arithmetic.exact import (
    LN_2,
    join_carry,
    largest_magnitude,
    power_above_max,
    round_to_float32,
    split_carry,
    to_float64,
    uncontracted,
)
from ..._arithmetic.products import exact_sum
from ..._arrays import Array, Arrays, Gradients, Namespace, map_leaves, shape, take_rows
from ..._backend import Ranks, ranks_of
from ..blocks.grid import (
    Grid,
    Sample,
    is_broadcast,
    make_grid,
    matmul_per_group,
    matmul_transposed,
    zero_unless_finite,
)
from ..blocks.plan import Plan, unpack
from ..blocks.visits import QueryRows, for_each_keys, for_each_rows
from ..call import Call, dropout_scale, flatten_group
from . import bounds
from .bounds import TERM_BITS, Reference, Terms, settle
from .scores import (
    ScoreBlock,
    cut_vectors,
    exact_block,
    exact_product,
    listed_rows,
    near_vectors,
    pad_rows,
    scaled_queries,
    score_block,
    unpack_logarithm,
)

BIAS_BITS = 40
MAX_BACKWARD_BLOCK = 512  # queries or keys


class RowTerms(NamedTuple):
    """Terms of each query, (B, G, R, M, ...), in float64."""

    query: Array  # (..., D)
    d_output: Array  # (..., E)
    anchor: Array  # a_i; this and the next (..., 1)
    logarithm: Array  # r_i
    delta: Array  # D_i

    def of(self, grid: Grid, sample: Sample) -> RowTerms:
        """Those of one sample, (G, R, M, ...)."""
        return RowTerms(*(grid.part_of(x, sample.index, sample.head) for x in self))


def backward(plan: Plan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Any) -> Gradients:
    """The gradients of query, key, value and bias, and ``None`` for each array of integers or booleans."""
    unpadded, xp = unpack(plan, arrays, backend), backend.namespace
    grid = make_grid(plan._replace(block_sizes=_square_blocks(plan, unpadded, xp)), unpadded)
    finite = (grid.finite_or_zero(x) for x in grid.call[1:3])
    grid = grid._replace(call=grid.call._replace(**dict(zip(("key", "value"), finite, strict=True))))
    rows = _row_terms(grid, results, cotangents)
    ranks = ranks_of(backend, plan.group)
    found = _filtered(grid, rows, ranks)
    (d_query,) = settle(grid, 0, found[:1], functools.partial(_reference, grid, rows, 0))
    d_key, d_value = settle(grid, 1, found[1:], functools.partial(_reference, grid, rows, 1), ranks)
    gradients = [d_query, d_key, d_value]
    if not grid.all_finite:
        gradients = [zero_unless_finite(x, like, xp) for x, like in zip(gradients, unpadded[:3], strict=True)]
    if grid.call.bias is not None:
        gradients.append(_bias_gradient(grid, rows))
    return *gradients, *[None] * (len(arrays) - len(gradients))


def _square_blocks(plan: Plan, call: Call, xp: Namespace) -> tuple[int, int]:
    """Blocks of as many queries as keys: sums over either are written once for each block of the other."""
    group_size = shape(call.query, xp=xp)[2]
    size = min(MAX_BACKWARD_BLOCK, plan.block_sizes[1])
    return max(32, size // group_size if isinstance(group_size, int) else size), size


def _row_terms(grid: Grid, results: Arrays, cotangents: Arrays) -> RowTerms:
    xp = grid.xp
    d_output, output, d_logsumexp, reference = (
        pad_rows(grid, to_float64(x, xp))
        for x in (cotangents[0], results[0], xp.expand_dims(cotangents[1], axis=-1), results[2])
    )
    products = uncontracted(xp.multiply(d_output, output), xp)  # which are exact
    delta = xp.subtract(exact_sum(products, -1, bits=TERM_BITS, xp=xp), d_logsumexp)
    query = to_float64(grid.finite_or_zero(grid.call.query), xp)
    return RowTerms(query, d_output, *unpack_logarithm(reference, xp), delta)


# The filter


class _Queries(NamedTuple):
    """What the filter needs of the queries of a sample, (G, R, M, ...): in float64, from the first size on float32."""

    scaled: Array  # nan where nothing is decided
    query: Array
    d_output: Array
    logarithm: Array  # natural
    delta: Array
    query_size: Array
    d_output_size: Array
    of_row: Array  # the error of weights, in units of `WEIGHT_ERROR`, as are the next two
    of_score: Array  # the same by the norm of the key
    of_dp: Array  # that of dP by the norm of the value


class _Keys(NamedTuple):
    """The same of the keys, (G, N, ...)."""

    near: Array  # nan where too long
    key: Array
    value: Array
    key_size: Array
    norm: Array
    value_norm: Array


def _filtered(grid: Grid, rows: RowTerms, ranks: Ranks | None) -> list[Array]:
    """The gradients of query, key and value as far as they are decided, else nan."""
    xp, widths = grid.xp, [shape(x, xp=grid.xp)[-1] for x in (rows.query, rows.query, rows.d_output)]
    stacks = (grid.gradient_stacks(*widths, after=rows.delta, dtype=dtype) for dtype in ("float64", "float32"))
    of_sample, add = functools.partial(_factors, grid, rows), functools.partial(_add_block, grid)
    stacks = for_each_keys(grid, of_sample, add, tuple(itertools.chain(*stacks)))
    sums = [grid.concat_blocks((stack,), side)[0] for stack, side in zip(stacks, SIDES, strict=True)]
    if ranks is not None:
        sums = [ranks.total(x) if side else x for x, side in zip(sums, SIDES, strict=True)]
    scale, factor = grid.call.scale, dropout_scale(grid.call.dropout)

    def decided(found: Array, sizes: Array, side: int, factor: float) -> Array:
        sizes = xp.add(xp.astype(sizes, xp.float64), bounds.sum_error(grid, 1 - side) * bounds.UNDERFLOW)
        bound = xp.add(xp.multiply(sizes, bounds.WEIGHT_ERROR * bounds.SLACK * abs(factor)), bounds.TINY)
        return bounds.decided(xp.multiply(found, factor), bound, round_to_float32, xp)

    return [*map(decided, sums[:3], sums[3:], SIDES, (scale, scale, factor))]


def _errors(grid: Grid, rows: RowTerms) -> tuple[Array, Array]:
    """The relative errors of weights of each query: what all have, and what is to be multiplied by the key's norm."""
    xp, softcap = grid.xp, grid.call.softcap
    _, norm = near_vectors(uncontracted(xp.multiply(rows.query, grid.call.scale), xp), grid.loops)
    size = xp.add(xp.abs(rows.anchor), xp.abs(rows.logarithm))
    of_row = xp.add(xp.multiply(size, 8 * bounds.ULP), bounds.WEIGHT_ERROR)
    of_score = xp.multiply(norm, bounds.score_error(rows.query.shape[-1]))
    if softcap is not None:  # whose derivative is off as well
        of_row = xp.add(of_row, (abs(softcap) + 2) * bounds.SOFTCAP_ERROR)
        of_score = xp.multiply(of_score, 1 + 2 / abs(softcap))
    return of_row, of_score


def _factors(grid: Grid, rows: RowTerms, sample: Sample) -> tuple[_Queries, _Keys]:
    xp, mine = grid.xp, rows.of(grid, sample)
    of_row, of_score = _errors(grid, mine)
    scaled, _ = near_vectors(scaled_queries(grid, sample.query), grid.loops)
    num_ranks = 1 if grid.plan.num_queries is None else -(-grid.plan.num_queries // max(1, grid.lengths[0]))
    of_sums = (xp.add(of_row, bounds.sum_error(grid, *side)) for side in ((0, num_ranks), (1,)))
    of_dp = bounds.score_error(mine.d_output.shape[-1]) * dropout_scale(grid.call.dropout)
    errors = xp.maximum(*of_sums), of_score, xp.multiply(_norm(mine.d_output, grid), of_dp)
    queries = _Queries(
        bounds.limited(scaled, of_row, xp),
        mine.query,
        mine.d_output,
        xp.multiply(xp.add(mine.anchor, mine.logarithm), LN_2),
        mine.delta,
        *(xp.astype(xp.abs(x), xp.float32) for x in mine[:2]),
        *(bounds.size_of(xp.multiply(x, 1 / bounds.WEIGHT_ERROR), xp) for x in errors),
    )
    key, value = to_float64(sample.key, xp), to_float64(sample.value, xp)
    near, norm = near_vectors(key, grid.loops)
    sizes = (xp.astype(x, xp.float32) for x in (xp.abs(key), norm, _norm(value, grid)))
    return queries, _Keys(near, key, value, *sizes)


def _norm(x: Array, grid: Grid) -> Array:
    return grid.xp.expand_dims(grid.loops.norm(x), axis=-1)


SIDES = 0, 1, 1, 0, 1, 1  # of the gradients of query, key and value, and of their errors


def _add_block(
    grid: Grid, sample: Sample, of_rows: _Queries, keys: _Keys, j: Any, masked: bool, i: Any, stacks: Any
) -> Any:
    """Add the gradients of one block of scores, and their errors: the same products, of errors and of sizes."""
    xp = grid.xp
    queries = _Queries(*(grid.loops.block(x, i, grid.sizes[0], -2) for x in of_rows))
    product = matmul_per_group(queries.scaled, xp.matrix_transpose(keys.near), xp)
    block = score_block(grid, sample, product, i=i, j=j, masked=masked)
    scores = block.scores
    scores -= queries.logarithm
    weights = grid.loops.inplace(xp.exp, scores)
    kept = grid.drop(weights, block.at)
    d_scores = _d_weights(grid, matmul_per_group(queries.d_output, xp.matrix_transpose(keys.value), xp), block)
    d_scores -= queries.delta
    d_scores *= weights
    relative = _relative_errors(queries, keys, block.bias, xp)
    of_scores, of_kept = bounds.size_of(xp.abs(d_scores), xp), bounds.size_of(kept, xp)
    of_scores *= relative
    of_scores += xp.multiply(xp.multiply(queries.of_dp, _as_row(keys.value_norm, xp)), of_kept)
    of_kept *= relative
    errors = of_scores, of_kept
    if masked:
        hidden = xp.equal(weights, 0.0)
        errors = xp.where(hidden, 0.0, of_scores), xp.where(hidden, 0.0, of_kept)
    if block.softcap_derivative is not None:
        d_scores *= block.softcap_derivative

    def products(d_scores: Array, kept: Array, query: Array, key: Array, d_output: Array) -> Arrays:
        of_query = matmul_per_group(d_scores, key, xp)
        return of_query, matmul_transposed(d_scores, query, xp), matmul_transposed(kept, d_output, xp)

    sums = (
        *products(d_scores, kept, queries.query, keys.key, queries.d_output),
        *products(*errors, queries.query_size, keys.key_size, queries.d_output_size),
    )
    places = [sample.round * count + index for count, index in zip(grid.counts, (i, j), strict=True)]
    return tuple(map(grid.loops.add_block, stacks, [places[side] for side in SIDES], sums))


def _relative_errors(queries: _Queries, keys: _Keys, bias: Array | None, xp: Namespace) -> Array:
    """Those of the weights of a block."""
    errors = xp.multiply(queries.of_score, _as_row(keys.norm, xp))
    errors += queries.of_row
    if bias is None:
        return errors
    of_bias = xp.multiply(xp.abs(bias), 8 * bounds.ULP / bounds.WEIGHT_ERROR)
    return xp.add(errors, xp.astype(of_bias, xp.float32))


def _as_row(x: Array, xp: Namespace) -> Array:
    """Numbers of keys (G, n, 1) next to scores (G, R, m, n)."""
    return xp.expand_dims(xp.matrix_transpose(x), axis=1)


def _d_weights(grid: Grid, product: Array, block: ScoreBlock) -> Array:
    """The gradient of the weights before dropout, of that of the weights after it."""
    if grid.call.dropout is None:
        return product
    dropped = grid.drop(product, block.at)
    return uncontracted(grid.xp.multiply(dropped, grid.call.dropout.scale), grid.xp)


# The reference


class _Exact(NamedTuple):
    """What exact gradients of scores are made of: first of queries, (G, R, M, ...), then of keys, (G, N, ...)."""

    of_queries: tuple[Any, ...]  # slices of queries and of gradients of outputs, and a_i, r_i and D_i
    of_keys: tuple[Any, ...]  # slices of keys and of values

    def replace(self, side: int, part: Callable[[Array], Array]) -> _Exact:
        """A part of the queries (side 0) or keys (side 1), by a function of each array of that side."""
        return _Exact(*(map_leaves(part, x) if side == n else x for n, x in enumerate(self)))


def _cut_factors(mine: RowTerms, sample: Sample, xp: Namespace) -> _Exact:
    query, d_output = (cut_vectors(x, xp) for x in mine[:2])
    key, value = (cut_vectors(to_float64(x, xp), xp) for x in (sample.key, sample.value))
    return _Exact((query, d_output, *mine[2:]), (key, value))


def _exact_d_scores(
    grid: Grid, sample: Sample, factors: _Exact, *, i: Any = 0, j: Any = 0, masked: bool
) -> tuple[Array, Array, ScoreBlock]:
    """Weights after dropout but for its scale, and the gradient of scores, of exact scores and an exact dP."""
    xp, ((query, d_output, anchor, logarithm, delta), (key, value)) = grid.xp, factors
    scores, block = exact_block(grid, sample, query, key, i=i, j=j, masked=masked)
    weights = exp2(xp.subtract(xp.subtract(scores, anchor), logarithm), xp)
    d_scores = xp.subtract(_d_weights(grid, exact_product(d_output, value, xp), block), delta)
    d_scores = uncontracted(xp.multiply(d_scores, weights), xp)
    hidden = xp.equal(scores, -math.inf)
    weights, d_scores = (xp.where(hidden, 0.0, x) for x in (weights, d_scores))
    return grid.drop(weights, block.at), d_scores, block


def _reference(grid: Grid, rows: RowTerms, side: int, sample: Sample) -> Reference:
    """Of some queries, the terms of their gradients; or of some keys, those of theirs and of their values."""
    xp, mine = grid.xp, rows.of(grid, sample)
    exact, key = _cut_factors(mine, sample, xp), to_float64(sample.key, xp)
    scale, factor = grid.call.scale, dropout_scale(grid.call.dropout)

    def terms(weights: Array, columns: Array, unit: float) -> Terms:
        flat = flatten_group(weights, xp=xp)
        flat = xp.matrix_transpose(flat) if side else flat
        return Terms(flat, columns, xp.full_like(flat[..., :1], unit))

    def of_rows(picked: Array) -> tuple[list[Terms], list[Array]]:
        factors = exact.replace(side, lambda x: take_rows(x, picked, axis=-2, xp=xp))
        listed = listed_rows(grid, sample, side, picked)
        kept, d_scores, block = _exact_d_scores(*listed, factors, masked=grid.may_mask)
        if block.softcap_derivative is not None:
            d_scores = uncontracted(xp.multiply(d_scores, block.softcap_derivative), xp)
        if side == 0:
            return [terms(d_scores, key, scale)], []
        query, d_output = (flatten_group(x, xp=xp) for x in mine[:2])
        return [terms(d_scores, query, scale), terms(kept, d_output, factor)], []

    return of_rows


# The gradient of the bias, of which each element is one of scores, or a sum of these


def _bias_gradient(grid: Grid, rows: RowTerms) -> Array:
    """Sums of exact gradients of scores, as integers relative to the largest of the rows that share an element."""
    xp, bias, loops = grid.xp, grid.call.bias, grid.loops

    def cut(sample: Sample) -> _Exact:
        return _cut_factors(rows.of(grid, sample), sample, xp)

    def largest_of(block: QueryRows, exact: _Exact) -> Arrays:
        def add_keys(masked: bool, j: Any, largest: Array) -> Array:
            factors = exact.replace(0, block.block).replace(1, lambda x: loops.block(x, j, grid.sizes[1], -2))
            _, d_scores, _ = _exact_d_scores(grid, block.sample, factors, i=block.i, j=j, masked=masked)
            return xp.maximum(largest, largest_magnitude(d_scores, -1, xp))

        return (block.visit(add_keys, xp.zeros_like(block.block(exact.of_queries[-1]))),)

    (largest,) = for_each_rows(grid, cut, largest_of, grid.row_stacks(1, dtype="float64"))
    shared = tuple(axis for axis in range(4) if is_broadcast(bias, axis))
    largest = pad_rows(grid, largest)
    unit = power_above_max(largest, (*shared, 4), xp)
    inverse = xp.add(xp.zeros_like(largest), xp.divide(2.0**BIAS_BITS, unit))

    def add(sample: Sample, of_rows: Any, of_keys: Any, j: Any, masked: bool, i: Any, stacks: Any) -> Any:
        block = QueryRows(grid, sample, i)
        factors = _Exact(of_rows, of_keys).replace(0, block.block)
        _, d_scores, _ = _exact_d_scores(grid, sample, factors, i=i, j=j, masked=masked)
        parts = split_carry(xp.round(xp.multiply(d_scores, block.block_of(inverse))), xp)
        return tuple(grid.add_bias_gradient(sample, *each, i, j=j) for each in zip(stacks, parts, strict=True))

    stacks = for_each_keys(grid, cut, add, tuple(grid.bias_stack("float64") for _ in range(2)), is_shared=True)
    total = join_carry(tuple(grid.concat_bias_gradient(stack) for stack in stacks), xp)
    if not is_broadcast(bias, -2):
        unit = unit[..., : grid.lengths[0], :]
    return round_to_float32(xp.multiply(total, xp.multiply(unit, 2.0**-BIAS_BITS)), xp)
