r"""The forward pass in reproducible arithmetic: correctly rounded, whatever a library adds up in which order.

*The reference* defines the output. With the exact scores :math:`t_{ij}` in units of log 2, and an integer
:math:`a_i` near their maximum over the keys that i may attend to,

.. math:: w_{ij} = 2^{t_{ij} - a_i}, \qquad F_{ie} = \frac{\sum_j w_{ij} v_{je}}{\sum_j w_{ij}},

where each sum is one of integers relative to its own largest term, which no order changes. The output is F, rounded to
float32. So the bits of a row depend on its query and on the keys and values that it may attend to: *row invariance*.

*The filter* finds most of them: the online softmax (M. Milakov, N. Gimelshein, 2018) in plain float64, with a bound of
what it and F are off by. Where both ends of the bound round to one number, that is the output. `settle` computes the
others. The bound may depend on anything, on masked keys as well: it decides who computes an output, not its bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..._arithmetic.elementary import exp2, log2
from ..._arithmetic.exact import (
    LN_2,
    LOG2_E,
    largest_magnitude,
    round_to_float32,
    to_float64,
    uncontracted,
)
from ..._arithmetic.products import exact_sum
from ..._arrays import Array, Arrays, Namespace, on_device_of, shape, zeros_with
from ..._backend import Backend, Operation, Ranks, register
from ..blocks.forward import empty_results as empty_results_of_blocks, with_nonfinite_values
from ..blocks.grid import Grid, Sample, make_grid, matmul_per_group
from ..blocks.plan import Plan, are_few, as_called, make_plan, unpack
from ..blocks.visits import QueryRows, for_each_rows
from ..call import Call, dropout_scale, upcast_call
from . import bounds
from .backward import backward
from .bounds import TERM_BITS, Reference, Terms, settle
from .scores import (
    cut_vectors,
    exact_block,
    listed_rows,
    near_vectors,
    pack_logarithm,
    scaled_queries,
    score_block,
)

MAX_SCORE = 2.0**137  # in units of log 2: above, rows are nan
UNIT_KEYS = 64  # about so many values of a channel tell its unit


def reproducible_attention(
    call: Call, group: str | None = None, num_queries: int | None = None, grid: Grid | None = None
) -> tuple[Array, ...]:
    """Output (..., H, M, E) and logsumexp (..., H, M) in float32, of which every library computes the same bits.

    The third result is `pack_logarithm`, (B, G, R, M, 6). Ranks of a group may share the queries, so many in all:
    each has all keys, and gets their whole gradients. If no number is given, they share the keys. A grid is one that
    lasts.
    """
    if grid is None:
        plan, arrays = arrange(call)
        plan = plan._replace(group=group, num_queries=num_queries)
        output, logsumexp, reference = call.backend.custom_gradient(REPRODUCIBLE, plan, arrays)
    else:
        output, logsumexp, reference = _results(grid.of(upcast_call(call)))
    return *as_called(call, shape(call.value, xp=call.xp)[-1], output, logsumexp), reference


def arrange(call: Call) -> tuple[Plan, Arrays]:
    """The plan of a call, and its arrays."""
    xp, call = call.xp, upcast_call(call)
    scale = 1 / math.sqrt(max(1, shape(call.query, xp=xp)[-1])) if call.scale is None else float(call.scale)
    return make_plan(call._replace(scale=scale, softcap=None if call.softcap is None else float(call.softcap)))


def forward(plan: Plan, arrays: Arrays, backend: Backend) -> tuple[Array, Array, Array]:
    """Output (B, G, R, M, E), logsumexp (B, G, R, M), and `pack_logarithm` (B, G, R, M, 6)."""
    return _results(make_grid(plan, unpack(plan, arrays, backend)), lambda: empty_results(plan, arrays, backend))


def _results(grid: Grid, empty: Callable[[], Arrays] = tuple) -> tuple[Array, Array, Array]:
    """The results of a grid, whose values may not be finite."""
    return _forward(grid) if grid.call.assume_finite else with_nonfinite_values(grid, _forward, empty)


def _forward(grid: Grid) -> tuple[Array, Array, Array]:
    xp, ranks = grid.xp, grid.ranks
    found = _filtered(grid, ranks)
    output, logarithm = settle(grid, 0, found, functools.partial(_reference, grid, ranks), ranks)
    none = xp.equal(logarithm[..., :1], -math.inf)
    whole = xp.add(logarithm[..., :1], logarithm[..., 1:])
    logsumexp = xp.where(none, -math.inf, uncontracted(xp.multiply(whole, LN_2), xp))
    logsumexp = xp.squeeze(round_to_float32(logsumexp, xp), axis=-1)
    return output, logsumexp, pack_logarithm(xp.where(none, 0.0, logarithm), xp)


def empty_results(plan: Plan, arrays: Arrays, backend: Backend) -> tuple[Array, Array, Array]:
    """Zeros of the shapes and dtypes of `forward`."""
    output, logsumexp, _ = empty_results_of_blocks(plan, arrays, backend)
    return output, logsumexp, zeros_with(output, *shape(logsumexp, xp=backend.namespace), 6, xp=backend.namespace)


REPRODUCIBLE = register("reproducible", Operation(forward, backward, empty_results, needs_float64=True))


# The filter


class _Near(NamedTuple):
    """A sample for the filter. Where queries are few, keys and values are prepared a block at a time."""

    query: Array  # scaled, (G, R, M, D)
    query_norm: Array  # (G, R, M, 1)
    key: Array | None = None  # (G, N, D)
    norm: Array | None = None  # of keys, (G, N, 1)
    columns: Array | None = None  # values, their sizes in units, these times norms of keys, ones, norms
    units: Any = 1.0  # of channels, (G, 1, 1, E)


def _filtered(grid: Grid, ranks: Ranks | None) -> Arrays:
    """What `_decide` says of the online softmax in float64, with the sums that bound its error."""
    prepare, decide = functools.partial(_prepare, grid, ranks), functools.partial(_decide, grid, ranks)
    if ranks is not None:
        sums = for_each_rows(grid, prepare, _average, grid.row_stacks(1, 2, *_widths(grid), dtype="float64"))
        return decide(1.0, *_over_ranks(*sums, ranks=ranks, xp=grid.xp))
    stacks = *grid.row_stacks(grid.width), *grid.row_stacks(2, dtype="float64")
    return for_each_rows(grid, prepare, lambda rows, keys: decide(keys.units, *_average(rows, keys)), stacks)


def _over_ranks(row_max: Array, norm: Array, *sums: Array, ranks: Ranks, xp: Namespace) -> list[Array]:
    """The sums over the keys of all ranks."""
    known = xp.where(xp.isnan(row_max), math.inf, row_max)
    whole = ranks.largest(known)
    anchor = xp.where(xp.equal(whole, -math.inf), 0.0, whole)
    shrunk = xp.exp(xp.subtract(known, anchor))  # nan where it is infinite
    return [whole, ranks.largest(norm), *(ranks.total(xp.multiply(x, shrunk)) for x in sums)]


def _span(grid: Grid) -> Any:
    """How many sizes a value has: one for each channel, where queries are few, or for all."""
    return grid.width if are_few(grid.dims[2], grid.sizes[0]) else 1


def _widths(grid: Grid) -> list[Any]:
    """How many sums a query has, and how many more under a bias."""
    span = _span(grid)
    of_values = span if are_few(grid.dims[2], grid.sizes[0]) else 2 * span
    return [grid.width + of_values + 2, *([] if grid.call.bias is None else [span + 1])]


def _prepare(grid: Grid, ranks: Ranks | None, sample: Sample) -> _Near:
    xp = grid.xp
    queries = near_vectors(scaled_queries(grid, sample.query), grid.loops)
    if are_few(grid.dims[2], grid.sizes[0]):
        return _Near(*queries)
    key, norm = near_vectors(xp.astype(sample.key, xp.float64), grid.loops)
    value = _as_float64(grid, grid.value_part(sample.value))
    sizes = xp.abs(value)
    units = _units(sizes, xp) if ranks is None else xp.ones_like(sizes[..., :1, :])  # ranks share a bound
    size = largest_magnitude(xp.multiply(sizes, 1 / units), -1, xp)
    columns = [value, size, xp.multiply(size, norm), xp.ones_like(norm), norm]
    return _Near(*queries, key, norm, xp.concat(columns, axis=-1), xp.expand_dims(units, axis=1))


def _as_float64(grid: Grid, value: Array) -> Array:
    """Values for which the bound has room where subnormal ones count."""
    xp = grid.xp
    return xp.astype(value, xp.float64) if grid.call.dropout is None else to_float64(value, xp)


def _units(sizes: Array, xp: Namespace) -> Array:
    """A median of each channel, (G, 1, C), so that one size serves channels that are far apart.

    No number of a few hidden keys moves it far.
    """
    length = sizes.shape[-2]
    some = sizes[..., :: max(1, length // UNIT_KEYS) if isinstance(length, int) else 1, :]
    if 0 in sizes.shape:
        return xp.ones_like(some[..., :1, :])
    half = shape(some, xp=xp)[-2] // 2
    middle = xp.max(xp.sort(some, axis=-2)[..., half : half + 1, :], axis=-2, keepdims=True)  # of no key in a graph
    return xp.where(xp.logical_and(xp.isfinite(middle), xp.greater(middle, 0.0)), middle, 1.0)


def _average(rows: QueryRows, near: _Near) -> Arrays:
    """Of each query the largest score, the norm, and sums of weights times columns of all keys."""
    grid, xp = rows.grid, rows.grid.xp
    query, query_norm = rows.block(near.query), rows.block(near.query_norm)

    def weigh(masked: bool, j: Any) -> Arrays:
        block_of = functools.partial(grid.loops.block, index=j, size=grid.sizes[1], axis=-2)
        if near.key is None:
            key, norm = near_vectors(xp.astype(block_of(rows.sample.key), xp.float64), grid.loops)
        else:
            key, norm = block_of(near.key), block_of(near.norm)
        product = matmul_per_group(query, xp.matrix_transpose(key), xp)
        del key  # so that its memory can serve the values
        block = score_block(grid, rows.sample, product, i=rows.i, j=j, masked=masked)
        scores = block.scores
        block_max = xp.max(scores, axis=-1, keepdims=True)
        scores -= xp.where(xp.equal(block_max, -math.inf), 0.0, block_max)
        weights = grid.loops.inplace(xp.exp, scores)
        kept = grid.drop(weights, block.at)
        if near.columns is None:
            value = _as_float64(grid, grid.value_part(block_of(rows.sample.value)))
            sums, sizes = _sums_of_channels(grid, weights, kept, value, norm, query_norm)
        else:
            sums, sizes = _sums(grid, weights, kept, block_of(near.columns))
        longest = xp.expand_dims(xp.max(norm, axis=-2, keepdims=True), axis=1)
        if block.bias is None:
            return block_max, longest, sums
        weights = xp.multiply(weights, xp.where(xp.equal(weights, 0.0), 0.0, xp.abs(block.bias)))
        columns = xp.concat([sizes, xp.ones_like(norm)], axis=-1)
        return block_max, longest, sums, matmul_per_group(weights, columns, xp)

    if isinstance(grid.counts[1], int) and grid.counts[1] == 1:
        row_max, longest, *sums = weigh(grid.may_mask, 0)
    else:
        row_max, longest, *sums = rows.visit(functools.partial(_add_keys, weigh, xp), _no_keys(grid, query))
    return row_max, xp.concat([query_norm, xp.multiply(query_norm, longest)], axis=-1), *sums


def _no_keys(grid: Grid, query: Array) -> Arrays:
    """What `_average` finds before it sees a key."""
    xp, (*dims, _) = grid.xp, shape(query, xp=grid.xp)
    lowest = xp.full((*dims, 1), -math.inf, dtype=xp.float64, **on_device_of(query))
    longest = zeros_with(lowest, dims[0], 1, 1, 1, xp=xp)
    return lowest, longest, *(zeros_with(lowest, *dims, last, xp=xp) for last in _widths(grid))


def _add_keys(weigh: Callable[[bool, Any], Arrays], xp: Namespace, masked: bool, j: Any, state: Arrays) -> Arrays:
    """The sums with another block of keys, relative to the largest score so far."""
    (row_max, longest, *sums), (block_max, block_longest, *new) = state, weigh(masked, j)
    whole = xp.maximum(row_max, block_max)
    anchor = xp.where(xp.equal(whole, -math.inf), 0.0, whole)
    old, fresh = (xp.exp(xp.subtract(x, anchor)) for x in (row_max, block_max))
    sums = [xp.add(xp.multiply(x, old), xp.multiply(y, fresh)) for x, y in zip(sums, new, strict=True)]
    return whole, xp.maximum(longest, block_longest), *sums


def _sums(grid: Grid, weights: Array, kept: Array, columns: Array) -> tuple[Array, Array]:
    """Sums of weights times columns, and the sizes of values."""
    xp, sizes = grid.xp, columns[..., grid.width : grid.width + _span(grid)]
    if kept is weights:
        return matmul_per_group(weights, columns, xp), sizes
    pairs = (kept, columns[..., :-2]), (weights, columns[..., -2:])
    return xp.concat([matmul_per_group(*pair, xp) for pair in pairs], axis=-1), sizes


def _sums_of_channels(
    grid: Grid, weights: Array, kept: Array, value: Array, norm: Array, query_norm: Array
) -> tuple[Array, Array]:
    """The same with a size for each channel, in the memory of the values, and one sum for both errors of a weight.

    An error of a score counts as one of the row, of which no row has less than that of its sums.
    """
    xp, norm = grid.xp, grid.xp.expand_dims(grid.xp.matrix_transpose(norm), axis=1)
    found, sizes = matmul_per_group(kept, value, xp), grid.loops.inplace(xp.abs, value)
    per_norm = xp.divide(_per_norm(grid, query_norm), bounds.sum_error(grid, 1))
    larger = xp.add(kept, xp.multiply(xp.multiply(kept, norm), per_norm))
    total, by_norm = xp.sum(weights, axis=-1, keepdims=True), xp.sum(xp.multiply(weights, norm), axis=-1, keepdims=True)
    return xp.concat([found, matmul_per_group(larger, sizes, xp), total, by_norm], axis=-1), sizes


def _per_norm(grid: Grid, query_norm: Array) -> Array:
    """The error of scores by the norm of the key."""
    return grid.xp.multiply(query_norm, bounds.score_error(grid.call.query.shape[-1]))


def _decide(grid: Grid, ranks: Ranks | None, units: Any, row_max: Array, norm: Array, *sums: Array) -> Arrays:
    """The output in float32, and the logarithm of the sum of weights: nan where the sums leave them in doubt.

    The logarithm is a sum of two numbers, as in `pack_logarithm`; -inf in fully masked rows.
    """
    xp, width, span, softcap = grid.xp, grid.width, _span(grid), grid.call.softcap
    weight = sums[0][..., -2:-1]
    none = xp.equal(weight, 0.0)
    weight, row_max = xp.where(none, 1.0, weight), xp.where(none, 0.0, row_max)
    means = xp.divide(sums[0], weight)
    found, by_size, by_both = means[..., :width], means[..., width : width + span], means[..., width + span : -2]
    num_ranks = 1 if ranks is None else ranks.collectives.size(ranks.group)
    per_norm = _per_norm(grid, norm[..., :1])
    of_row = bounds.sum_error(grid, 1, num_ranks)
    of_row = xp.add(xp.multiply(xp.abs(row_max), 8 * bounds.ULP), of_row)
    if softcap is not None:
        of_row = xp.add(of_row, abs(softcap) * bounds.SOFTCAP_ERROR)
    of_row = bounds.limited(of_row, of_row, xp)
    of_scores = xp.multiply(per_norm, means[..., -1:])
    of_values = xp.multiply(by_size, of_row)
    if not are_few(grid.dims[2], grid.sizes[0]):
        of_values = xp.add(of_values, xp.multiply(by_both, per_norm))
    if len(sums) > 1:
        of_bias = xp.multiply(xp.divide(sums[1], weight), 8 * bounds.ULP)
        of_scores = xp.add(of_scores, of_bias[..., -1:])
        of_values = xp.add(of_values, of_bias[..., :-1])
    relative = xp.add(of_row, of_scores)
    factor = dropout_scale(grid.call.dropout)
    bound = xp.add(xp.multiply(of_values, units), xp.multiply(xp.abs(found), relative))
    bound = xp.multiply(bound, bounds.SLACK * factor)
    bound = xp.add(bound, bounds.SUBNORMAL if grid.call.dropout is None else bounds.TINY)
    output = bounds.decided(xp.multiply(found, factor), bound, round_to_float32, xp)
    logarithm = _decide_logarithm(grid, row_max, norm, weight, relative)
    return output, xp.where(none, -math.inf, logarithm)


def _decide_logarithm(grid: Grid, row_max: Array, norm: Array, weight: Array, relative: Array) -> Array:
    """The integer near the largest score in units of log 2, and the logarithm of the sum of weights relative to it."""
    xp, softcap = grid.xp, grid.call.softcap
    top, size = xp.multiply(row_max, LOG2_E), xp.abs(row_max)
    of_top = xp.multiply(norm[..., 1:], 2 * bounds.score_error(grid.call.query.shape[-1]))
    of_top = xp.add(of_top, xp.multiply(size, 32 * bounds.ULP))
    if softcap is not None:
        of_top = xp.add(of_top, 2 * abs(softcap) * bounds.SOFTCAP_ERROR)
    anchor = bounds.decided(top, of_top, lambda x, xp: xp.round(x), xp)
    of_weight = xp.log(weight)
    logarithm = xp.add(xp.subtract(top, anchor), xp.multiply(of_weight, LOG2_E))
    bound = xp.add(xp.multiply(relative, 2 * bounds.SLACK), xp.multiply(xp.add(size, of_weight), 16 * bounds.ULP))
    bound = xp.add(xp.add(bound, xp.multiply(of_weight, 2 * bounds.FUNCTION_ERROR)), bounds.LOGARITHM_ERROR)
    logarithm = bounds.decided(logarithm, bound, bounds.round_logarithm, xp)
    return xp.concat([xp.where(xp.isnan(logarithm), math.nan, anchor), logarithm], axis=-1)


# The reference


def _reference(grid: Grid, ranks: Ranks | None, sample: Sample) -> Reference:
    """Of some queries, the terms of their outputs, and the logarithms of their sums of weights."""
    xp = grid.xp
    key, values = sample.key, grid.value_part(sample.value)
    if not (grid.may_be_empty or grid.loops.traced):  # such values are in doubt, and no weight of 0 is to hide them
        key = xp.where(xp.all(xp.isfinite(values), axis=-1, keepdims=True), key, math.nan)
    keys = cut_vectors(to_float64(key, xp), xp)
    factor = dropout_scale(grid.call.dropout)

    def compute(rows: Array) -> tuple[list[Terms], list[Array]]:
        of_rows, listed = listed_rows(grid, sample, 0, rows)
        queries = cut_vectors(to_float64(listed.query, xp), xp)
        scores, block = exact_block(of_rows, listed, queries, keys, masked=grid.may_mask)
        top = xp.max(scores, axis=-1, keepdims=True)
        if ranks is not None:
            top = ranks.largest(xp.where(xp.isnan(top), math.inf, top))
        top = xp.where(xp.equal(top, -math.inf), 0.0, top)
        anchor = xp.round(xp.where(xp.less(xp.abs(top), MAX_SCORE), top, math.nan))
        weights = exp2(xp.subtract(scores, anchor), xp)
        total = exact_sum(weights, -1, bits=TERM_BITS, ranks=ranks, xp=xp)
        total = xp.where(xp.equal(total, 0.0), 1.0, total)
        kept = of_rows.drop(weights, block.at)
        num_groups, group_size, num_rows, num_keys = shape(kept, xp=xp)
        dims = num_groups, group_size * num_rows
        units = uncontracted(xp.multiply(uncontracted(xp.divide(1.0, total), xp), factor), xp)
        terms = Terms(xp.reshape(kept, (*dims, num_keys)), values, xp.reshape(units, (*dims, 1)))
        logarithm = bounds.round_logarithm(log2(total, xp), xp)
        return [terms], [xp.concat([anchor, logarithm], axis=-1)]

    return compute
