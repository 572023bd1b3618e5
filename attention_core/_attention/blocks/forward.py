r"""Attention over blocks of queries and keys, in memory that does not grow with M × N: the forward pass.

The weights of a block are computed, used and forgotten. Each block of keys brings up to date a running maximum
m, total z and sum u of every query,

.. math:: m' = \max(m, \max_j s_{ij}), \qquad z' = e^{m - m'} z + \sum_j e^{s_{ij} - m'}, \qquad
          u' = e^{m - m'} u + \sum_j e^{s_{ij} - m'} v_j,

and :math:`o_i = u / z`, :math:`\ell_i = m + \log z`. Where norms bound all scores by 32, m is 0, and nothing is
subtracted or rescaled. What rounding takes from the logsumexp is kept for the backward pass. Where m is large, that is
all of :math:`\log z`.

NaN and infinities that are attended to show, and masked ones do not. Where a library has a softmax that makes one pass
over the scores, a few queries at a time take all of their keys by the definition: in *query chunks*.

References
----------
M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018. T. Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from ..._arrays import Array, Arrays, dtype_name, scalar_like, shape, zeros_with
from ..._backend import Backend, Operation, can_be_read, register
from ...masks._band import ALL
from ...masks._mask import band_of, bounds_of
from ..call import Call, upcast_call
from ..dense import dense
from ..facts import facts_of, nonfinite_indicators, repaired_unless_clean, with_infinities
from ..parts import Run, cut, cut_of, with_cut
from ..softmax import log_normalizer
from .backward import backward
from .grid import Grid, make_grid, matmul_per_group
from .plan import Plan, as_called, block_tuning, lasts, make_plan, unpack
from .visits import QueryRows, ScoreBlock, for_each_rows, make_visits, score_block

MAX_PLAIN_SCORE = 32.0  # below this, exponentials of scores can be taken as they are
NORM_LIMIT = 1e15  # of norms, and of values


def blockwise(call: Call, grid: Grid | None = None) -> tuple[Array, ...]:
    """Attention over blocks, in the type of the computation: output (..., H, M, E), and of each row two numbers.

    They are the logsumexp (..., H, M), and what is to be added to that to make it exact. A grid is one that lasts.
    """
    call = upcast_call(call)
    if grid is None:
        results = call.backend.custom_gradient(BLOCKWISE, *make_plan(call))
    else:
        results = _results(grid.of(call), tuple)
    return as_called(call, shape(call.value, xp=call.xp)[-1], *results)


def forward_grid(plan: Plan, call: Call) -> Grid:
    """The grid of a call, with the blocks that are visited."""
    if call.mask is not None and not call.backend.loops.traced:
        # Smaller blocks of keys skip more of a mask; neighbours are then joined to runs of the former size.
        plan = plan._replace(block_sizes=(plan.block_sizes[0], min(plan.block_sizes)))
    grid = make_grid(plan, call)
    return grid._replace(visits=make_visits(grid, by_key=False, run_keys=block_tuning(call).keys))


def forward(plan: Plan, arrays: Arrays, backend: Backend) -> tuple[Array, Array, Array]:
    """Output (B, G, R, M, E), logsumexp (B, G, R, M), and what is to be added to that to make it exact."""
    call = unpack(plan, arrays, backend)

    def of_blocks() -> Any:
        return _results(forward_grid(plan, call), functools.partial(empty_results, plan, arrays, backend))

    chunks = query_chunks(call)
    if not chunks:
        return of_blocks()  # type: ignore[no-any-return]
    return repaired_unless_clean(attend_query_chunks(chunks), of_blocks, backend.loops)  # type: ignore[no-any-return]


def _results(grid: Grid, empty: Callable[[], Arrays]) -> Any:
    """The results of a grid, whose values may not be finite."""
    if scores_are_small(grid):
        return _grid_results(grid._replace(all_finite=True, exp_without_max=True))
    return _grid_results(grid) if grid.all_finite else with_nonfinite_values(grid, _grid_results, empty)


def empty_results(plan: Plan, arrays: Arrays, backend: Backend) -> tuple[Array, Array, Array]:
    """Arrays like those of `forward`, for compilers that ask for shapes alone."""
    xp, (query, _, value) = backend.namespace, arrays[:3]
    *dims, _ = shape(query, xp=xp)
    width = shape(value, xp=xp)[-1]
    output, logsumexp, remainder = (zeros_with(query, *dims, *last, xp=xp) for last in ((width,), (), ()))
    return output, logsumexp, remainder


def scores_are_small(grid: Grid) -> bool:
    r"""Whether exponentials of scores can be taken as they are, without a maximum, and averaged by.

    .. math:: |q_i \cdot k_j| \le \max_i \|q_i\| \, \max_j \|k_j\| \le 32

    in each head keeps exponentials between 1e-14 and 1e14, and products with values between 1e-15 and 1e15, or 0, are
    far from both ends of float32. Libraries that differentiate are not asked, as it pays little there.
    """
    call, xp, norm = grid.call, grid.xp, grid.loops.norm
    is_product = not grid.changes_scores and call.bias is None
    if not (grid.work and grid.width and is_product) or call.backend.differentiates or call.assume_finite:
        return False
    norms, magnitudes = (xp.max(norm(call.query), axis=(2, 3)), xp.max(norm(call.key), axis=2)), xp.abs(call.value)
    bounds = xp.multiply(xp.minimum(norms[0], NORM_LIMIT), xp.minimum(norms[1], NORM_LIMIT))  # inf * 0 would be nan
    fit = xp.all(xp.less(bounds, MAX_PLAIN_SCORE))
    for each in (*norms, magnitudes):
        fit = xp.logical_and(fit, xp.less(xp.max(each), NORM_LIMIT))
    smallest = xp.min(xp.where(xp.equal(magnitudes, 0.0), 1.0, magnitudes))
    return bool(xp.logical_and(fit, xp.greater(smallest, 1 / NORM_LIMIT)))


def _grid_results(grid: Grid) -> tuple[Array, Array, Array]:
    """The results of one pass over the blocks."""
    output, rows = for_each_rows(grid, operator.attrgetter("query"), _attend, grid.row_stacks(grid.width, 2))
    return output, rows[..., 0], rows[..., 1]


class Running(NamedTuple):
    """Of a block of queries, over the keys so far: u, z, m, and whether there was a key to attend to."""

    weighted_sum: Array
    total: Array
    row_max: Array | None
    has_key: Array | None


def _attend(rows: QueryRows, queries: Array) -> tuple[Array, Array]:
    """Output of a block of queries, and logsumexp with its remainder (..., 2): 0 and -inf in fully masked rows."""
    grid, xp, query = rows.grid, rows.grid.xp, rows.block(queries)
    empty = _empty_state(grid, query) if grid.loops.traced and grid.visits is not None else None
    state = rows.visit(functools.partial(_absorb, rows, query), empty)
    weighted_sum, total, row_max, has_key = _empty_state(grid, query) if state is None else state
    if has_key is not None:
        total = xp.where(has_key, total, 1.0)
    output, dropout = xp.divide(weighted_sum, total), grid.call.dropout
    output = output if dropout is None else xp.multiply(output, dropout.scale)
    none = None if has_key is None else xp.logical_not(has_key)
    return output, xp.concat(list(log_normalizer(row_max, xp.log(total), none, xp)), axis=-1)


def _absorb(rows: QueryRows, query: Array, masked: bool, j: Any, state: Running | None) -> Running:
    """The running sums after one more block of keys."""
    grid, sample, xp, loops = rows.grid, rows.sample, rows.grid.xp, rows.grid.loops
    keys, values = [loops.block(x, j, grid.sizes[1], -2) for x in (sample.key, sample.value)]
    block = score_block(grid, sample, query, xp.matrix_transpose(keys), i=rows.i, j=j, masked=masked)
    if grid.exp_without_max:
        new_max, exponentials = None, loops.inplace(xp.exp, block.scores)
    else:
        before = scalar_like(_lowest(query, xp), query, xp) if state is None else state.row_max
        new_max = xp.maximum(xp.max(block.scores, axis=-1, keepdims=True), before)
        exponentials = loops.exp_difference(block.scores, new_max)
    total = xp.sum(exponentials, axis=-1, keepdims=True)
    weights = exponentials if grid.call.dropout is None else grid.drop(exponentials, block.at)
    has_key = _has_key(grid, block, total, rows.i, j=j) if grid.may_be_empty else None
    weighted_sum = matmul_per_group(weights, grid.value_part(values), xp)
    if state is None:
        return Running(weighted_sum, total, new_max, has_key)
    sums = state.weighted_sum, state.total
    if new_max is not None:
        rescale = loops.exp_difference(state.row_max, new_max)
        sums = xp.multiply(state.weighted_sum, rescale), xp.multiply(state.total, rescale)
    return Running(
        loops.inplace(xp.add, sums[0], weighted_sum),
        loops.inplace(xp.add, sums[1], total),
        new_max,
        None if has_key is None else xp.logical_or(state.has_key, has_key),
    )


def _lowest(like: Array, xp: Any) -> float:
    """The least finite number: no score is below, and an infinity is never subtracted from itself."""
    return -float(xp.finfo(like.dtype).max)


def _has_key(grid: Grid, block: ScoreBlock, total: Array, i: Any, j: Any) -> Array:
    """Which queries may attend to a key of a block."""
    xp, allowed = grid.xp, block.allowed
    everywhere = xp.ones_like(total, dtype=xp.bool)
    if allowed is None:
        return everywhere
    compute = functools.partial(xp.any, allowed, axis=-1, keepdims=True)
    return xp.logical_and(everywhere, grid.cached_by_distance("has_key", i, j, like=allowed, compute=compute))


def _empty_state(grid: Grid, rows: Array) -> Running:
    """The running sums over no keys."""
    xp = grid.xp
    *dims, _ = shape(rows, xp=xp)
    total = zeros_with(rows, *dims, 1, xp=xp)
    return Running(
        zeros_with(rows, *dims, grid.width, xp=xp),
        total,
        None if grid.exp_without_max else xp.full_like(total, _lowest(rows, xp)),
        xp.zeros_like(total, dtype=xp.bool) if grid.may_be_empty else None,
    )


BLOCKWISE = register("blockwise", Operation(forward, backward, empty_results, lasts=lasts))


def with_nonfinite_values(grid: Grid, average: Callable[[Grid], Arrays], empty: Callable[[], Arrays]) -> Arrays:
    """The results of ``average(grid)``, which averages the values of a grid, for values that may not be finite.

    A non-finite value that is attended to appears in the output, whatever its weight, which may underflow. So averages
    of indicators, one of inf or NaN, one of -inf or NaN, have *even* scores: 0 wherever mask and bias allow them. A
    host runs, looks at the result, and repairs it. A traced loop adds two passes where there is such a value. It holds
    all passes, as it is traced once. An accelerator is not asked.
    """
    xp, loops = grid.xp, grid.loops
    if loops.traced and grid.may_be_empty:
        infinite = xp.astype(xp.logical_not(xp.isfinite(xp.sum(grid.call.value))), xp.int32)
        infinite = infinite if grid.ranks is None else grid.ranks.largest(infinite)
        num_passes = xp.add(xp.multiply(infinite, 2), 1)
        return loops.loop(0, num_passes, functools.partial(_one_pass, grid, average), empty())  # type: ignore[no-any-return]
    repair = functools.partial(_of_columns, grid, average)
    if loops.traced or not can_be_read(grid.call.value):
        return repair()
    grid = grid._replace(all_finite=True)
    if grid.may_be_empty and grid.call.arithmetic == "reproducible":  # where a row is nan only if it attends to a nan
        finite = xp.isfinite(grid.call.value)
        if grid.ranks is None and bool(xp.all(finite)):  # ranks look at results, which are those of all
            return average(grid)
        key = xp.where(xp.all(finite, axis=-1, keepdims=True), grid.call.key, math.nan)
        grid = grid._replace(call=grid.call._replace(key=key, value=xp.where(finite, grid.call.value, 0.0)))
    results = average(grid)
    return repaired_unless_clean(results, repair, loops)  # type: ignore[no-any-return]


def _of_columns(grid: Grid, average: Any) -> Arrays:
    """The results of finite values, with the infinities that queries attend to: all of them where nothing is masked.

    Else an even pass, in fast arithmetic, averages the indicators side by side.
    """
    xp, (query, key, value, *_), ranks = grid.xp, grid.call, grid.ranks
    columns = xp.concat(nonfinite_indicators(value, xp), axis=-1)
    if grid.may_be_empty:
        # Of one channel, which takes less time.
        even_call = grid.call._replace(query=query[..., :1], key=key[..., :1], value=columns)
        even = grid._replace(call=even_call, width=shape(columns, xp=xp)[-1], weighed=lambda x, even: even(x))
        attended, *_ = _grid_results(even)
    else:
        attended = xp.expand_dims(xp.sum(columns, axis=-2, keepdims=True), axis=2)
    attended = attended if ranks is None else ranks.largest(attended)
    output, *rest = average(grid._replace(call=grid.call._replace(value=xp.where(xp.isfinite(value), value, 0.0))))
    return with_infinities((output, attended[..., : grid.width], attended[..., grid.width :]), xp), *rest


def _one_pass(grid: Grid, average: Any, number: Any, results: Arrays) -> Arrays:
    """Pass 0 averages finite values; pass 1 adds attended inf to the output, and pass 2 attended -inf."""
    xp, before = grid.xp, results[0]
    is_first, infinity = xp.equal(number, 0), xp.multiply(xp.astype(3 - 2 * number, before.dtype), math.inf)

    def part_of(block: Array) -> Array:
        is_indicated = xp.logical_or(xp.isnan(block), xp.equal(block, xp.astype(infinity, block.dtype)))
        return xp.where(is_first, grid.finite_or_zero(block), xp.astype(is_indicated, block.dtype))

    def weighed(x: Array, even: Callable[[Array], Array]) -> Array:
        return grid.loops.cond(is_first, lambda: x, lambda: even(x))

    found = average(grid._replace(value_part=part_of, weighed=weighed))
    attended = xp.greater(found[0], 0.0)
    both = xp.logical_and(attended, xp.equal(before, xp.negative(infinity)))
    after = xp.where(attended, xp.add(before, infinity), before)
    after = xp.where(both, math.nan, after)  # nan of one sign, where a processor gives inf - inf another
    firsts = zip(found, (after, *results[1:]), strict=True)
    return tuple([xp.where(is_first, first, later) for first, later in firsts])


MAX_CHUNKS = 16  # each is a part of the program
MAX_SCORE_BYTES = 2**27  # of the scores of all chunks, which a library may compute side by side


def query_chunks(call: Call) -> list[Call]:
    """Parts of a call, each with some queries and the keys that one of them may attend to; none if it is for no chunks.

    Its mask looks at ``key - query`` alone.
    """
    (query, key), min_queries, band = call[:2], call.backend.tuning.query_chunk, band_of(call.mask)
    sizes = (*query.shape, *key.shape, *call.value.shape, *call.starts)
    is_plain = call.bias is None and call.softcap is None and call.score_mod is None and call.dropout is None
    if call.backend.loops.softmax is None or not (min_queries and is_plain and bounds_of(call.mask).is_relative):
        return []
    if band == ALL or 0 in sizes[:-2] or not all(isinstance(size, int) for size in sizes):
        return []
    length, size = query.shape[-2], max(min_queries, -(-query.shape[-2] // MAX_CHUNKS))
    parts = [cut(call, rows=Run(first, min(size, length - first))) for first in range(0, length, size)]
    parts = [with_cut(part, cut_of(part, [band])) for part in parts]
    num_scores = sum(math.prod(part.query.shape[:-1]) * part.key.shape[-2] for part in parts)
    itemsize = 8 if dtype_name(query.dtype) == "float64" else 4
    return parts if num_scores * itemsize <= MAX_SCORE_BYTES else []


def attend_query_chunks(parts: list[Call]) -> Any:
    """The results of `forward` of parts of a call of five axes, where neither scores nor averages overflow."""
    xp, (batch, heads, group, _, width) = parts[0].xp, parts[0].query.shape
    queries = [xp.reshape(part.query, (batch, heads * group, part.query.shape[-2], width)) for part in parts]
    pairs = zip(parts, queries, strict=True)
    parts = [part._replace(query=query, scale=1.0, assume_finite=True) for part, query in pairs]
    found = [dense(part, facts_of(part), weights=False) for part in parts]

    def join(arrays: list[Array]) -> Array:
        joined = xp.concat(arrays, axis=2)  # the axis of queries
        return xp.reshape(joined, (batch, heads, group, *joined.shape[2:]))

    output, _, *numbers = map(list, zip(*found, strict=True))
    return join(output), *map(join, numbers)
