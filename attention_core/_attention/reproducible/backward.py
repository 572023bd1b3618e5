r"""The backward pass in reproducible arithmetic, block by block.

In FlashAttention's notation, with the output gradient dO,

.. math:: dP = dO\, V^T, \quad D_i = \sum_e dO_{ie} O_{ie} - d\ell_i, \quad dS = P \circ (dP - D),
    \quad dV = P^T dO, \quad dQ = \sigma\, dS\, K, \quad dK = \sigma\, dS^T Q,

where :math:`d\ell` is the gradient of the logsumexp. The weights are computed as :math:`w_{ij} = p_{ij} 2^{c_i}` (see
`backward_reference`), of which none exceeds 4 / 3. The factor :math:`2^{-c_i}` goes to what they are multiplied by.
The d_scores are cut into slices relative to a bound of the whole row, so no pass over them has to come first.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from attention_core._arithmetic.elementary import exp2_weight
from attention_core._arithmetic.exact import (
    from_three_float32,
    join_carry,
    largest_magnitude,
    power_above,
    power_above_max,
    round_to_float32,
    split_carry,
    to_float64,
    uncontracted,
)
from attention_core._arithmetic.products import row_dots
from attention_core._arrays import Array, Arrays, Gradients, Namespace, shape, zeros_with
from attention_core._attention.blocks.grid import (
    Grid,
    Sample,
    is_broadcast,
    make_grid,
    matmul_per_group,
    matmul_transposed,
)
from attention_core._attention.blocks.nonfinite import zero_unless_finite
from attention_core._attention.blocks.plan import Operands, Plan, unpack_operands
from attention_core._attention.blocks.visits import make_visits, visit_blocks
from attention_core._attention.call import dropout_scale
from attention_core._attention.reproducible import slices
from attention_core._attention.reproducible.slices import Parts

BIAS_BITS = 40
MAX_BACKWARD_BLOCK = 512  # queries or keys


class RowTerms(NamedTuple):
    """Terms of each query, (B, G, R, M, ...), in float64."""

    d_output: Array  # (..., E)
    reference: Array  # subtracted from scores, in their units; this and all below (..., 1)
    weight_unit: Array  # the power of two 2**-c_i that makes softmax probabilities of weights
    delta: Array  # D_i
    bound: Array  # a power of two above |w_ij (dP_ij - D_i)|


class BackwardOperands(NamedTuple):
    """The arrays of which the backward pass takes blocks, besides query, key and value."""

    d_output: Array  # (B, G, R, M, 2 E), packed as queries are
    d_output_columns: Array  # (B, G, R, M, 2 E): times the weight unit, in slices relative to each channel
    query_columns: Array  # (B, G, R, M, 2 D): queries times the unit of their d_scores, likewise
    rows: Array  # (B, G, R, M, 4): reference, delta, 1 / bound, unit of d_scores over that of the bias gradient
    key_columns: Array  # (B, G, N, 2 D)


class GradientUnits(NamedTuple):
    """The powers of two that the sums of integers are counted in."""

    query: Array  # (B, G, R, M, D)
    key: Array  # (B, G, 1, D)
    value: Array  # (B, G, 1, E)
    bias: Array | None


def backward(plan: Plan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Any) -> Gradients:
    """The gradients of query, key, value and bias, and ``None`` for each array of integers or booleans.

    What is summed over queries is cut relative to maxima over those of all ranks, and rounded when all integers are
    added.
    """
    unpadded, xp = unpack_operands(plan, arrays), backend.namespace
    grid = make_grid(plan._replace(block_sizes=_square_blocks(plan, unpadded, xp)), unpadded, backend)
    query, key, value = (to_float64(grid.finite_or_zero(x), xp) for x in grid.operands[:3])
    rows = _row_terms(grid, value, results, cotangents)
    operands, units = _slice_operands(grid, query, key, rows, backend)
    packed = grid.operands._replace(
        query=slices.slice_query(grid, grid.operands.query),
        key=slices.slice_key(grid, grid.operands.key),
        value=slices.pack_vectors(grid, value, first_last=True),
    )
    *accumulators, of_bias = _accumulate(grid._replace(operands=packed), operands)
    sums = [*grid.concat_blocks(accumulators[:1], 0), *grid.concat_blocks(accumulators[1:], 1)]
    if plan.group is not None:
        sums[1:] = [backend.collectives.total(total, plan.group) for total in sums[1:]]
    gradients = [_join_gradient(grid, total, units, which) for which, total in enumerate(sums)]
    if not plan.all_finite:
        gradients = [zero_unless_finite(x, like, xp) for x, like in zip(gradients, unpadded[:3], strict=True)]
    if units.bias is not None:
        gradients.append(_join_bias_gradient(grid, of_bias, units.bias))
    return *gradients, *(None for _ in range(plan.num_integers))


def _common_power(grid: Grid, factors: Array, backend: Any) -> Array:
    """The power of two above the factors of all queries, those of other ranks among them, for each channel."""
    if grid.plan.group is not None:
        factors = backend.collectives.largest(largest_magnitude(factors, (-3, -2), grid.xp), grid.plan.group)
    return power_above_max(factors, (-3, -2), grid.xp)


def _square_blocks(plan: Plan, operands: Operands, xp: Namespace) -> tuple[int, int]:
    """Blocks of as many queries as keys: sums over either are written once for each block of the other."""
    group_size = shape(operands.query, xp=xp)[2]
    size = min(MAX_BACKWARD_BLOCK, plan.block_sizes[1])
    return max(32, size // group_size if isinstance(group_size, int) else size), size


# Before the loops: terms of rows, and operands in slices


def _row_terms(grid: Grid, value: Array, results: Arrays, cotangents: Arrays) -> RowTerms:
    xp = grid.xp
    d_output, output, d_logsumexp, reference = (
        slices.pad_rows(grid, to_float64(x, xp))
        for x in (cotangents[0], results[0], xp.expand_dims(cotangents[1], axis=-1), results[2])
    )
    delta = xp.subtract(row_dots(d_output, output, xp), d_logsumexp)
    value_power = xp.expand_dims(power_above_max(value, (-2, -1), xp), axis=2)
    terms = float(shape(value, xp=xp)[-1] * math.ceil(dropout_scale(grid.dropout)))
    d_weights_bound = xp.multiply(xp.multiply(power_above_max(d_output, -1, xp), value_power), terms)
    return RowTerms(
        d_output=d_output,
        reference=from_three_float32(reference[..., :3], xp),
        weight_unit=reference[..., 3:],
        delta=delta,
        bound=xp.multiply(power_above(xp.add(d_weights_bound, xp.abs(delta)), xp), 2.0),
    )


def _slice_operands(
    grid: Grid, query: Array, key: Array, rows: RowTerms, backend: Any
) -> tuple[BackwardOperands, GradientUnits]:
    xp = grid.xp
    d_score_unit = xp.multiply(rows.bound, rows.weight_unit)
    d_output_factors, query_factors = xp.multiply(rows.d_output, rows.weight_unit), xp.multiply(query, d_score_unit)
    value_unit, key_unit = (_common_power(grid, x, backend) for x in (d_output_factors, query_factors))
    query_unit = power_above_max(key, -2, xp)
    bias_unit = None if grid.operands.bias is None else _bias_unit(grid, d_score_unit)
    in_bias_units = d_score_unit
    if bias_unit is not None:
        in_bias_units = xp.multiply(xp.divide(d_score_unit, bias_unit), 2.0**BIAS_BITS)
    row_columns = [rows.reference, rows.delta, xp.divide(1.0, rows.bound), in_bias_units]
    operands = BackwardOperands(
        d_output=slices.pack_vectors(grid, rows.d_output, first_last=False),
        d_output_columns=slices.concat_slices(d_output_factors, value_unit, slices.D_OUTPUT_BITS, 2, xp=xp),
        query_columns=slices.concat_slices(query_factors, key_unit, slices.D_SCORE_FACTOR_BITS, 2, xp=xp),
        rows=xp.concat(row_columns, axis=-1),
        key_columns=slices.concat_slices(key, query_unit, slices.D_SCORE_FACTOR_BITS, 2, xp=xp),
    )
    units = GradientUnits(
        query=xp.multiply(d_score_unit[..., : grid.lengths[0], :], xp.expand_dims(query_unit, axis=2)),
        key=xp.squeeze(key_unit, axis=2),
        value=xp.squeeze(value_unit, axis=2),
        bias=bias_unit,
    )
    return operands, units


def _bias_unit(grid: Grid, d_score_unit: Array) -> Array:
    """The largest unit of d_scores among the rows that share an element of the bias, and of no others."""
    xp, bias = grid.xp, grid.operands.bias
    shared = tuple(axis for axis in range(4) if is_broadcast(bias, axis))
    unit = xp.max(d_score_unit, axis=shared, keepdims=True) if shared else d_score_unit
    return xp.where(xp.equal(unit, 0.0), 1.0, unit)  # padding rows have unit 0


# The loops over blocks


class _KeyBlock(NamedTuple):
    """A block of keys, and the arrays whose blocks of queries it is visited with."""

    grid: Grid
    sample: Sample
    operands: BackwardOperands  # of all queries of one element of the batch, and of these keys
    keys: Array
    values: Array
    j: Any


def _accumulate(grid: Grid, operands: BackwardOperands) -> Any:
    """Exact sums for the gradients of query, key, value and bias, for which blocks are visited key by key."""
    loops, grid = grid.loops, grid._replace(visits=make_visits(grid, by_key=True))
    biases = None if grid.operands.bias is None else (grid.bias_stack(), grid.bias_stack())
    widths = map(sum, _gradient_widths(grid, operands))
    accumulators = (*grid.gradient_stacks(*widths, after=operands.rows), biases)

    def add_sample(index: Any, accumulators: Any) -> Any:
        sample = grid.sample_at(index)
        of_sample = BackwardOperands(*(grid.part_of(x, sample.index, sample.head) for x in operands))

        def add_keys(j: Any, accumulators: Any) -> Any:
            keys, values, key_columns = (
                loops.block(x, j, grid.sizes[1], -2) for x in (sample.key, sample.value, of_sample.key_columns)
            )
            of_keys = of_sample._replace(key_columns=key_columns)
            block = _KeyBlock(grid, sample, of_keys, keys, values=values, j=j)
            d_query, d_key, d_value, d_bias = accumulators
            add_queries = functools.partial(_add_queries, block, index)
            state = (d_query, *_zero_key_sums(block), d_bias)
            d_query, *sums, d_bias = visit_blocks(grid, sample.index, j, add_queries, state)
            key_block = index * grid.counts[1] + j
            d_key, d_value = (
                loops.add_block(accumulator, key_block, grid.xp.concat(list(parts), axis=-1))
                for accumulator, parts in zip((d_key, d_value), sums, strict=True)
            )
            return d_query, d_key, d_value, d_bias

        return loops.loop(0, grid.counts[1], add_keys, accumulators)

    return grid.for_each_sample(add_sample, accumulators, is_shared=biases is not None)


def _gradient_widths(grid: Grid, operands: BackwardOperands) -> tuple[list[Any], ...]:
    """The widths of the parts of sums for the gradients of query, key and value."""
    over_keys, over_queries = slices.needs_carry(grid, 1), slices.needs_carry(grid, 0)
    depth, width = (shape(x, xp=grid.xp)[-1] // 2 for x in (operands.key_columns, operands.d_output_columns))
    return (
        slices.slice_widths(depth, 2, over_keys),
        slices.slice_widths(depth, 2, over_queries),
        slices.slice_widths(width, 2, over_queries),
    )


def _zero_key_sums(block: _KeyBlock) -> tuple[Parts, ...]:
    xp = block.grid.xp
    *dims, _ = shape(block.keys, xp=xp)
    _, *widths = _gradient_widths(block.grid, block.operands)
    return tuple(tuple(zeros_with(block.keys, *dims, last, xp=xp) for last in lasts) for lasts in widths)


def _add_queries(block: _KeyBlock, index: Any, masked: bool, i: Any, state: Any) -> Any:
    """Add the gradients of one block of scores."""
    grid, xp = block.grid, block.grid.xp
    over_keys, over_queries = slices.needs_carry(grid, 1), slices.needs_carry(grid, 0)
    d_query, d_key, d_value, d_bias = state
    arrays = block.sample.query, *block.operands[:4]
    query, *of_queries = (grid.loops.block(x, i, grid.sizes[0], -2) for x in arrays)
    queries = block.operands._replace(**dict(zip(BackwardOperands._fields, of_queries, strict=False)))
    scores = slices.exact_score_block(grid, block.sample, query, block.keys, i=i, j=block.j, masked=masked)
    weights, d_scores = _d_scores(block, queries, scores)
    if d_bias is not None:
        d_bias = _add_d_bias(block, queries, d_bias, d_scores, i=i)
    if scores.softcap_derivative is not None:
        d_scores *= scores.softcap_derivative
    parts = slices.weight_slices(d_scores, slices.D_SCORE_BITS, 2, grid)
    d_key = _add_sums(
        d_key, slices.sliced_matmul(parts, queries.query_columns, matmul_transposed, xp), over_queries, xp
    )
    d_value = _add_sums(
        d_value, slices.sliced_matmul(weights, queries.d_output_columns, matmul_transposed, xp), over_queries, xp
    )
    sums = slices.with_carry(slices.sliced_matmul(parts, queries.key_columns, matmul_per_group, xp), over_keys, xp)
    d_query = grid.loops.add_block(d_query, index * grid.counts[0] + i, xp.concat(list(sums), axis=-1))
    return d_query, d_key, d_value, d_bias


def _d_scores(block: _KeyBlock, queries: BackwardOperands, scores: slices.ExactScoreBlock) -> tuple[list[Array], Array]:
    """Slices of the weights after dropout, and the gradient of the scores in units of each row, at most 1."""
    grid, xp = block.grid, block.grid.xp
    reference, delta, inverse_bound = (queries.rows[..., n : n + 1] for n in range(3))
    exponents = scores.scores
    exponents -= reference  # in the memory of the scores, which are not used again
    weights = exp2_weight(exponents, xp)
    d_weights = slices.packed_matmul(grid, queries.d_output, block.values)
    if grid.dropout is not None:
        d_weights = grid.drop(d_weights, scores.at)
        d_weights = uncontracted(xp.multiply(d_weights, grid.dropout.scale), xp)
    d_scores = xp.subtract(d_weights, delta)
    d_scores *= weights
    d_scores *= inverse_bound
    parts = slices.weight_slices(weights, slices.WEIGHT_BITS[2], 2, grid)
    return [grid.drop(part, scores.at) for part in parts], d_scores


def _add_sums(sums: Parts, new: Parts, carry: bool, xp: Namespace) -> Parts:
    return tuple(map(xp.add, sums, slices.with_carry(new, carry, xp)))


def _add_d_bias(
    block: _KeyBlock, queries: BackwardOperands, accumulators: Any, d_scores: Array, *, i: Any
) -> tuple[Any, ...]:
    """Add d_scores as integers in a unit that all rows share; in two parts, so that their sums are exact."""
    grid, xp = block.grid, block.grid.xp
    parts = split_carry(xp.round(xp.multiply(d_scores, queries.rows[..., 3:])), xp)
    return tuple(
        grid.add_bias_gradient(block.sample, accumulator, part, i, j=block.j)
        for accumulator, part in zip(accumulators, parts, strict=True)
    )


# After the loops: from sums to gradients


def _join_gradient(grid: Grid, sums: Array, units: Any, which: int) -> Array:
    """The gradient of the query, key or value, rounded once."""
    xp, unit, carry = grid.xp, units[which], slices.needs_carry(grid, int(which == 0))
    left_bits, right_bits, factor = (
        (slices.WEIGHT_BITS[2], slices.D_OUTPUT_BITS, dropout_scale(grid.dropout))
        if which == 2
        else (slices.D_SCORE_BITS, slices.D_SCORE_FACTOR_BITS, grid.plan.score_scale)
    )
    parts = slices.split_columns(sums, slices.slice_widths(shape(unit, xp=xp)[-1], 2, carry))
    total = slices.combine_slices(slices.without_carry(parts, carry, xp), left_bits, right_bits, xp)
    gradient = xp.multiply(xp.multiply(total, unit), factor * 2.0 ** -(left_bits + right_bits))
    return round_to_float32(gradient, xp)


def _join_bias_gradient(grid: Grid, accumulators: Any, unit: Array) -> Array:
    xp = grid.xp
    total = join_carry(tuple(grid.concat_bias_gradient(accumulator) for accumulator in accumulators), xp)
    if not is_broadcast(grid.operands.bias, -2):
        unit = unit[..., : grid.lengths[0], :]
    return round_to_float32(xp.multiply(total, xp.multiply(unit, 2.0**-BIAS_BITS)), xp)
