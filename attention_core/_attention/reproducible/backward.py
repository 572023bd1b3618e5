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
import math
from typing import Any, NamedTuple

from ..._arithmetic.elementary import exp2
from ..._arithmetic.exact import (
    LN_2,
    join_carry,
    power_above_max,
    round_to_float32,
    split_carry,
    to_float64,
    uncontracted,
)
from ..._arithmetic.products import exact_sum
from ..._arrays import Array, Arrays, Gradients, Namespace, shape, take_rows, zeros_with
from ..._backend import Ranks, ranks_of
from ..blocks.grid import (
    Grid,
    Sample,
    is_broadcast,
    make_grid,
    matmul_per_group,
    matmul_transposed,
)
from ..blocks.nonfinite import zero_unless_finite
from ..blocks.plan import Plan, unpack
from ..blocks.visits import make_visits, visit_blocks
from ..call import Call, dropout_scale, flatten_group
from . import bounds
from .rows import QueryRows, for_each_rows, pad_rows, unpack_logarithm
from .scores import (
    ScoreBlock,
    cut_vectors,
    exact_block,
    exact_product,
    listed_rows,
    near_vectors,
    scaled_queries,
    score_block,
)
from .settle import TERM_BITS, Reference, Terms, settle

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
    rows = _row_terms(grid, unpadded, results, cotangents)
    ranks = ranks_of(backend, plan.group)
    found = _filtered(grid, rows, ranks)
    (d_query,) = settle(grid, 0, found[:1], (), functools.partial(_of_queries, grid, rows))
    d_key, d_value = settle(grid, 1, found[1:], (), functools.partial(_of_keys, grid, rows), ranks)
    gradients = [d_query, d_key, d_value]
    if not plan.all_finite:
        gradients = [zero_unless_finite(x, like, xp) for x, like in zip(gradients, unpadded[:3], strict=True)]
    if grid.call.bias is not None:
        gradients.append(_bias_gradient(grid, rows))
    return *gradients, *[None] * (len(arrays) - len(gradients))


def _square_blocks(plan: Plan, call: Call, xp: Namespace) -> tuple[int, int]:
    """Blocks of as many queries as keys: sums over either are written once for each block of the other."""
    group_size = shape(call.query, xp=xp)[2]
    size = min(MAX_BACKWARD_BLOCK, plan.block_sizes[1])
    return max(32, size // group_size if isinstance(group_size, int) else size), size


def _row_terms(grid: Grid, unpadded: Call, results: Arrays, cotangents: Arrays) -> RowTerms:
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


class _Factors(NamedTuple):
    """What the scores of a sample are multiplied by, in plain float64."""

    query: Array  # scaled, nan where nothing is decided; this and those up to delta (G, R, M, ...)
    logarithm: Array  # natural
    delta: Array
    d_output: Array
    query_columns: Array  # queries, and their largest times both errors of a score
    d_output_columns: Array  # output gradients, the same of these, and the error of dP times the largest of queries
    key: Array  # (G, N, D), nan where too long
    value: Array
    key_columns: Array  # keys, their largest, that times the norm, and times the norm of the value


def _filtered(grid: Grid, rows: RowTerms, ranks: Ranks | None) -> Arrays:
    """The gradients of query, key and value as far as they are decided, else nan."""
    xp, width, value_width = grid.xp, shape(rows.query, xp=grid.xp)[-1], shape(rows.d_output, xp=grid.xp)[-1]
    stacks = grid.gradient_stacks(width + 3, width + 2, value_width + 3, after=rows.delta, dtype="float64")
    accumulators = _accumulate(grid, rows, tuple(stacks))
    sums = [*grid.concat_blocks(accumulators[:1], 0), *grid.concat_blocks(accumulators[1:], 1)]
    if ranks is not None:
        sums[1:] = map(ranks.total, sums[1:])
    key, value = (to_float64(x, xp)[..., : grid.lengths[1], :] for x in grid.call[1:3])
    (_, key_norm), value_norm = near_vectors(key, grid.loops), _norm(value, grid)
    of_row, of_score = _errors(grid, rows)
    of_row, of_score = (x[..., : grid.lengths[0], :] for x in (of_row, of_score))
    of_dp = bounds.score_error(rows.d_output.shape[-1])
    d_output_norm = _norm(rows.d_output, grid)[..., : grid.lengths[0], :]
    scale, factor = grid.plan.score_scale, dropout_scale(grid.call.dropout)

    def decided(total: Array, bound: Array, width: Any, factor: float) -> Array:
        bound = xp.add(xp.multiply(bound, bounds.SLACK * abs(factor)), bounds.TINY)
        return bounds.decided(xp.multiply(total[..., :width], factor), bound, round_to_float32, xp)

    def combined(total: Array, *weights: Any) -> Array:
        parts = (total[..., n - len(weights) :][..., :1] for n in range(len(weights)))
        return functools.reduce(xp.add, (xp.multiply(*pair) for pair in zip(parts, weights, strict=True)))

    of_keys = xp.add(of_row, bounds.sum_error(grid, 1))
    d_query = decided(
        sums[0], combined(sums[0], of_keys, of_score, xp.multiply(d_output_norm, of_dp * factor)), width, scale
    )
    d_key_bound = combined(sums[1], xp.ones_like(key_norm), key_norm)
    d_key_bound = xp.add(d_key_bound, xp.multiply(sums[2][..., -1:], xp.multiply(value_norm, of_dp * factor)))
    d_value_bound = combined(sums[2][..., :-1], xp.ones_like(key_norm), key_norm)
    return d_query, decided(sums[1], d_key_bound, width, scale), decided(sums[2], d_value_bound, value_width, factor)


def _errors(grid: Grid, rows: RowTerms) -> tuple[Array, Array]:
    """The relative errors of weights of each query: what all have, and what is to be multiplied by the key's norm."""
    xp, softcap = grid.xp, grid.call.softcap
    _, norm = near_vectors(uncontracted(xp.multiply(rows.query, grid.plan.score_scale), xp), grid.loops)
    size = xp.add(xp.abs(rows.anchor), xp.abs(rows.logarithm))
    of_row = xp.add(xp.multiply(size, 8 * bounds.ULP), bounds.WEIGHT_ERROR)
    of_score = xp.multiply(norm, bounds.score_error(rows.query.shape[-1]))
    if softcap is not None:  # whose derivative is off as well
        of_row = xp.add(of_row, (abs(softcap) + 2) * bounds.SOFTCAP_ERROR)
        of_score = xp.multiply(of_score, 1 + 2 / abs(softcap))
    return of_row, of_score


def _norm(x: Array, grid: Grid) -> Array:
    return grid.xp.expand_dims(grid.loops.norm(x), axis=-1)


def _factors(grid: Grid, rows: RowTerms, sample: Sample) -> _Factors:
    xp, mine = grid.xp, rows.of(grid, sample)
    query, _ = near_vectors(scaled_queries(grid, sample.query), grid.loops)
    of_row, of_score = _errors(grid, mine)
    query = bounds.limited(query, of_row, xp)
    num_rows = 1 if grid.plan.num_queries is None else -(-grid.plan.num_queries // max(1, grid.lengths[0]))
    of_row = xp.add(of_row, bounds.sum_error(grid, 0, num_rows))
    largest, of_output = (bounds.largest_size(x, xp) for x in mine[:2])
    d_norm = _norm(mine.d_output, grid)
    columns = [mine.query, *(xp.multiply(largest, x) for x in (of_row, of_score))]
    d_columns = [mine.d_output, *(xp.multiply(of_output, x) for x in (of_row, of_score)), xp.multiply(largest, d_norm)]
    keys, value = to_float64(sample.key, xp), to_float64(sample.value, xp)
    key, key_norm = near_vectors(keys, grid.loops)
    top = bounds.largest_size(keys, xp)
    key_columns = [keys, top, xp.multiply(top, key_norm), xp.multiply(top, _norm(value, grid))]
    return _Factors(
        query=query,
        logarithm=xp.multiply(xp.add(mine.anchor, mine.logarithm), LN_2),
        delta=mine.delta,
        d_output=mine.d_output,
        query_columns=xp.concat(columns, axis=-1),
        d_output_columns=xp.concat(d_columns, axis=-1),
        key=key,
        value=value,
        key_columns=xp.concat(key_columns, axis=-1),
    )


def _accumulate(grid: Grid, rows: RowTerms, accumulators: Any) -> Any:
    """Sums for the gradients of query, key and value, and their bounds, for which blocks are visited key by key."""
    loops, grid = grid.loops, grid._replace(visits=make_visits(grid, by_key=True))

    def add_sample(index: Any, accumulators: Any) -> Any:
        sample = grid.sample_at(index)
        factors = _factors(grid, rows, sample)

        def add_keys(j: Any, accumulators: Any) -> Any:
            of_keys = {name: loops.block(getattr(factors, name), j, grid.sizes[1], -2) for name in _OF_KEYS}
            block = factors._replace(**of_keys)
            d_query, d_key, d_value = accumulators
            *dims, _ = shape(block.key, xp=grid.xp)
            widths = shape(factors.query_columns, xp=grid.xp)[-1], shape(factors.d_output_columns, xp=grid.xp)[-1]
            zeros = (zeros_with(block.key, *dims, width, xp=grid.xp) for width in widths)
            add = functools.partial(_add_queries, grid, sample, block, index, j)
            d_query, *sums = visit_blocks(grid, sample.index, j, add, (d_query, *zeros))
            key_block = index * grid.counts[1] + j
            added = (loops.add_block(x, key_block, y) for x, y in zip((d_key, d_value), sums, strict=True))
            return d_query, *added

        return loops.loop(0, grid.counts[1], add_keys, accumulators)

    return grid.for_each_sample(add_sample, accumulators)


_OF_KEYS = ("key", "value", "key_columns")


def _add_queries(
    grid: Grid, sample: Sample, factors: _Factors, index: Any, j: Any, masked: bool, i: Any, state: Any
) -> Any:
    """Add the gradients of one block of scores."""
    xp, width = grid.xp, shape(factors.key, xp=grid.xp)[-1]
    d_query, d_key, d_value = state
    of_rows = {name: grid.loops.block(getattr(factors, name), i, grid.sizes[0], -2) for name in _OF_ROWS}
    query, logarithm, delta, d_output, query_columns, d_output_columns, key, value, key_columns = factors._replace(
        **of_rows
    )
    product = matmul_per_group(query, xp.matrix_transpose(key), xp)
    block = score_block(grid, sample, product, i=i, j=j, masked=masked)
    scores = block.scores
    scores -= logarithm
    weights = grid.loops.inplace(xp.exp, scores)
    kept = grid.drop(weights, block.at)
    d_scores = _d_weights(grid, matmul_per_group(d_output, xp.matrix_transpose(value), xp), block)
    d_scores -= delta
    d_scores *= weights
    sizes, of_kept = xp.abs(d_scores), kept
    if block.bias is not None:  # of which a score is off by so many digits: as if its weight were larger
        larger = xp.add(xp.multiply(xp.where(xp.equal(weights, 0.0), 0.0, xp.abs(block.bias)), 2.0**-4), 1.0)
        sizes, of_kept = xp.multiply(sizes, larger), xp.multiply(kept, larger)
    if block.softcap_derivative is not None:
        d_scores *= block.softcap_derivative
    of_keys = (
        matmul_transposed(x, y, xp)
        for x, y in ((d_scores, query_columns[..., :width]), (sizes, query_columns[..., width:]))
    )
    d_key = xp.add(d_key, xp.concat(list(of_keys), axis=-1))
    value_width = shape(d_output, xp=xp)[-1]
    if of_kept is kept:
        d_value = xp.add(d_value, matmul_transposed(kept, d_output_columns, xp))
    else:
        of_values = (
            matmul_transposed(x, y, xp) for x, y in ((kept, d_output), (of_kept, d_output_columns[..., value_width:]))
        )
        d_value = xp.add(d_value, xp.concat(list(of_values), axis=-1))
    of_queries = (
        matmul_per_group(x, y, xp)
        for x, y in (
            (d_scores, key_columns[..., :width]),
            (sizes, key_columns[..., width:-1]),
            (of_kept, key_columns[..., -1:]),
        )
    )
    d_query = grid.loops.add_block(d_query, index * grid.counts[0] + i, xp.concat(list(of_queries), axis=-1))
    return d_query, d_key, d_value


_OF_ROWS = ("query", "logarithm", "delta", "d_output", "query_columns", "d_output_columns")


def _d_weights(grid: Grid, product: Array, block: ScoreBlock) -> Array:
    """The gradient of the weights before dropout, of that of the weights after it."""
    if grid.call.dropout is None:
        return product
    dropped = grid.drop(product, block.at)
    return uncontracted(grid.xp.multiply(dropped, grid.call.dropout.scale), grid.xp)


# The reference


def _exact_d_scores(
    grid: Grid, rows: RowTerms, scores: Array, product: Array, block: ScoreBlock
) -> tuple[Array, Array]:
    """Weights after dropout but for its scale, and the gradient of scores, of exact scores and an exact dP."""
    xp = grid.xp
    weights = exp2(xp.subtract(xp.subtract(scores, rows.anchor), rows.logarithm), xp)
    d_scores = xp.subtract(_d_weights(grid, product, block), rows.delta)
    d_scores = uncontracted(xp.multiply(d_scores, weights), xp)
    hidden = xp.equal(scores, -math.inf)
    weights, d_scores = (xp.where(hidden, 0.0, x) for x in (weights, d_scores))
    return grid.drop(weights, block.at), d_scores


def _before_softcap(d_scores: Array, block: ScoreBlock, xp: Namespace) -> Array:
    if block.softcap_derivative is None:
        return d_scores
    return uncontracted(xp.multiply(d_scores, block.softcap_derivative), xp)


def _of_queries(grid: Grid, rows: RowTerms, sample: Sample) -> Reference:
    """Of some queries, the terms of their gradients."""
    xp, mine = grid.xp, rows.of(grid, sample)
    key, value = (to_float64(x, xp) for x in (sample.key, sample.value))
    cut_keys, cut_values = cut_vectors(to_float64(sample.key, xp), xp), cut_vectors(value, xp)

    def of_rows(picked: Array) -> tuple[list[Terms], list[Array]]:
        listed = listed_rows(grid, sample, 0, picked)
        these = RowTerms(*(take_rows(x, picked, axis=-2, xp=xp) for x in mine))
        scores, block = listed.scores(cut_vectors(these.query, xp), cut_keys)
        product = exact_product(cut_vectors(these.d_output, xp), cut_values, xp)
        _, d_scores = _exact_d_scores(listed.grid, these, scores, product, block)
        factors = flatten_group(_before_softcap(d_scores, block, xp), xp=xp)
        return [Terms(factors, key, xp.full_like(factors[..., :1], grid.plan.score_scale))], []

    return of_rows


def _of_keys(grid: Grid, rows: RowTerms, sample: Sample) -> Reference:
    """Of some keys, the terms of their gradients and of those of their values."""
    xp, mine = grid.xp, rows.of(grid, sample)
    cut_queries, cut_outputs = cut_vectors(mine.query, xp), cut_vectors(mine.d_output, xp)
    columns = [flatten_group(x, xp=xp) for x in (mine.query, mine.d_output)]
    factors = grid.plan.score_scale, dropout_scale(grid.call.dropout)

    def of_rows(picked: Array) -> tuple[list[Terms], list[Array]]:
        listed = listed_rows(grid, sample, 1, picked)
        key, value = (cut_vectors(to_float64(x, xp), xp) for x in (listed.sample.key, listed.sample.value))
        scores, block = listed.scores(cut_queries, key)
        product = exact_product(cut_outputs, value, xp)
        kept, d_scores = _exact_d_scores(listed.grid, mine, scores, product, block)
        transposed = (
            xp.matrix_transpose(flatten_group(x, xp=xp)) for x in (_before_softcap(d_scores, block, xp), kept)
        )
        terms = zip(transposed, columns, factors, strict=True)
        return [Terms(x, y, xp.full_like(x[..., :1], factor)) for x, y, factor in terms], []

    return of_rows


# The gradient of the bias, of which each element is one of scores, or a sum of these


def _bias_gradient(grid: Grid, rows: RowTerms) -> Array:
    """Sums of exact gradients of scores, as integers relative to the largest of the rows that share an element."""
    xp, bias, loops = grid.xp, grid.call.bias, grid.loops
    largest = for_each_rows(
        grid, functools.partial(_cut_factors, grid, rows), _largest_d_score, grid.row_stacks(1, dtype="float64")
    )[0]
    shared = tuple(axis for axis in range(4) if is_broadcast(bias, axis))
    largest = pad_rows(grid, largest)
    unit = power_above_max(largest, (*shared, 4), xp)
    inverse = xp.add(xp.zeros_like(largest), xp.divide(2.0**BIAS_BITS, unit))
    by_rows = grid._replace(visits=make_visits(grid, by_key=False))

    def add_sample(index: Any, stacks: Any) -> Any:
        sample = grid.sample_at(index)
        prepared = _cut_factors(grid, rows, sample)

        def add_rows(i: Any, stacks: Any) -> Any:
            block = QueryRows(by_rows, sample, i)

            def add_keys(masked: bool, j: Any, stacks: Any) -> Any:
                d_scores = _d_scores_at(block, prepared, masked, j)
                parts = split_carry(xp.round(xp.multiply(d_scores, block.block_of(inverse))), xp)
                return tuple(
                    grid.add_bias_gradient(sample, stack, part, i, j=j)
                    for stack, part in zip(stacks, parts, strict=True)
                )

            return block.visit(add_keys, stacks)

        return loops.loop(0, grid.counts[0], add_rows, stacks)

    stacks = grid.for_each_sample(add_sample, tuple(grid.bias_stack("float64") for _ in range(2)), is_shared=True)
    total = join_carry(tuple(grid.concat_bias_gradient(stack) for stack in stacks), xp)
    if not is_broadcast(bias, -2):
        unit = unit[..., : grid.lengths[0], :]
    return round_to_float32(xp.multiply(total, xp.multiply(unit, 2.0**-BIAS_BITS)), xp)


class _CutFactors(NamedTuple):
    """Slices of the vectors of a sample, and terms of its rows."""

    rows: RowTerms
    query: list[Array]
    d_output: list[Array]
    key: list[Array]
    value: list[Array]


def _cut_factors(grid: Grid, rows: RowTerms, sample: Sample) -> _CutFactors:
    xp, mine = grid.xp, rows.of(grid, sample)
    vectors = mine.query, mine.d_output, to_float64(sample.key, xp), to_float64(sample.value, xp)
    return _CutFactors(mine, *(cut_vectors(x, xp) for x in vectors))


def _largest_d_score(block: QueryRows, factors: _CutFactors) -> Arrays:
    xp = block.grid.xp

    def add_keys(masked: bool, j: Any, largest: Array) -> Array:
        sizes = xp.abs(_d_scores_at(block, factors, masked, j))
        return xp.maximum(largest, xp.max(sizes, axis=-1, keepdims=True))

    *dims, _ = shape(block.block(factors.rows.delta), xp=xp)
    return (block.visit(add_keys, zeros_with(factors.rows.delta, *dims, 1, xp=xp)),)


def _d_scores_at(rows: QueryRows, factors: _CutFactors, masked: bool, j: Any) -> Array:
    grid, xp = rows.grid, rows.grid.xp
    mine = RowTerms(*map(rows.block, factors.rows))
    query, d_output = ([rows.block(x) for x in slices] for slices in (factors.query, factors.d_output))
    key, value = (
        [grid.loops.block(x, j, grid.sizes[1], -2) for x in slices] for slices in (factors.key, factors.value)
    )
    scores, block = exact_block(grid, rows.sample, query, key, i=rows.i, j=j, masked=masked)
    return _exact_d_scores(grid, mine, scores, exact_product(d_output, value, xp), block)[1]
