r"""Attention over blocks of queries and keys, in memory that does not grow with M × N: the forward pass.

The weights of a block are computed, used and forgotten. Each block of keys brings up to date a running maximum
m, total z and sum u of every query,

.. math:: m' = \max(m, \max_j s_{ij}), \qquad z' = e^{m - m'} z + \sum_j e^{s_{ij} - m'}, \qquad
          u' = e^{m - m'} u + \sum_j e^{s_{ij} - m'} v_j,

and :math:`o_i = u / z`, :math:`\ell_i = m + \log z`. Where norms bound all scores by 32, m is 0, and nothing is
subtracted or rescaled. What rounding takes from the logsumexp is kept for the backward pass. Where m is large, that is
all of :math:`\log z`.

References
----------
M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018. T. Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..._arrays import Array, Arrays, scalar_like, shape, zeros_with
from ..._backend import Backend, Operation, can_be_read, register
from ..call import Call, upcast_call
from ..facts import MAX_KEPT
from ..finite import repaired_unless_clean
from ..softmax import log_normalizer
from .backward import backward
from .grid import Grid, Sample, make_grid, matmul_per_group
from .nonfinite import with_nonfinite_values
from .plan import (
    Plan,
    block_tuning,
    in_five_axes,
    lasts,
    make_plan,
    unpack,
    with_value_facts,
)
from .query_chunks import attend_query_chunks, query_chunks
from .scores import ScoreBlock, score_block
from .visits import make_visits, visit_blocks


def blockwise(call: Call, grid: Grid | None = None) -> tuple[Array, Array, Array]:
    """Attention over blocks, in the type of the computation: output (..., H, M, E), and of each row two numbers.

    They are the logsumexp (..., H, M), and what is to be added to that to make it exact. A grid is one that lasts.
    """
    xp, call = call.xp, upcast_call(call)
    if grid is None:
        output, logsumexp, remainder = call.backend.custom_gradient(BLOCKWISE, *make_plan(call))
    else:
        arrays, *_ = in_five_axes(call)
        plan = with_value_facts(grid.plan, arrays, call.backend, have_values=True)
        whole = grid.call._replace(**dict(zip(("query", "key", "value"), arrays, strict=True)))
        cache = grid.cache if grid.cache is None or math.prod(grid.lengths) <= MAX_KEPT else {}
        output, logsumexp, remainder = _results(grid._replace(plan=plan, call=whole, cache=cache), tuple)
    *dims, _ = shape(call.query, xp=xp)
    output = xp.reshape(output, (*dims, shape(call.value, xp=xp)[-1]))
    return output, xp.reshape(logsumexp, tuple(dims)), xp.reshape(remainder, tuple(dims))


def lasting_grid(call: Call) -> Grid | None:
    """The grid of all calls of the signature of this one, without arrays; ``None`` if it depends on more than that.

    Libraries that differentiate keep none, as in `facts.lasting_facts`.
    """
    backend = call.backend
    if backend.differentiates or call.score_mod is not None or not can_be_read(*call[:3]):
        return None
    plan, arrays = make_plan(upcast_call(call))
    if len(arrays) > 3:
        return None
    plan = plan._replace(exp_without_max=None, all_finite=bool(call.assume_finite) or not plan.may_mask)
    grid = _forward_grid(plan, unpack(plan, arrays, backend))
    return grid._replace(call=grid.call._replace(query=None, key=None, value=None))


def _forward_grid(plan: Plan, call: Call) -> Grid:
    """The grid of a call, with the blocks that are visited."""
    if call.mask is not None and not call.backend.loops.traced:
        # Smaller blocks of keys skip more of a mask; neighbours are then joined to runs of the former size.
        plan = plan._replace(block_sizes=(plan.block_sizes[0], min(plan.block_sizes)))
    grid = make_grid(plan, call)
    if grid.is_one_block:
        return grid
    return grid._replace(visits=make_visits(grid, by_key=False, run_keys=block_tuning(call).keys))


def forward(plan: Plan, arrays: Arrays, backend: Backend) -> tuple[Array, Array, Array]:
    """Output (B, G, R, M, E), logsumexp (B, G, R, M), and what is to be added to that to make it exact."""
    plan = with_value_facts(plan, arrays, backend)
    call = unpack(plan, arrays, backend)

    def of_blocks() -> Any:
        return _results(_forward_grid(plan, call), functools.partial(empty_results, plan, arrays, backend))

    chunks = query_chunks(call)
    if not chunks:
        return of_blocks()  # type: ignore[no-any-return]
    return repaired_unless_clean(attend_query_chunks(call, chunks), of_blocks, backend.loops)  # type: ignore[no-any-return]


def _results(grid: Grid, empty: Callable[[], Arrays]) -> Any:
    """The results of a grid, whose values may not be finite."""
    return _grid_results(grid) if grid.plan.all_finite else with_nonfinite_values(grid, _grid_results, empty)


def empty_results(plan: Plan, arrays: Arrays, backend: Backend) -> tuple[Array, Array, Array]:
    """Arrays like those of `forward`, for compilers that ask for shapes alone."""
    xp, (query, _, value) = backend.namespace, arrays[:3]
    *dims, _ = shape(query, xp=xp)
    width = shape(value, xp=xp)[-1]
    output, logsumexp, remainder = (zeros_with(query, *dims, *last, xp=xp) for last in ((width,), (), ()))
    return output, logsumexp, remainder


def _grid_results(grid: Grid) -> tuple[Array, Array, Array]:
    """The results of one pass over the blocks."""
    attend = functools.partial(_attend_sample, grid)
    outputs, numbers = grid.for_each_sample(attend, grid.row_stacks(grid.width, 2))
    output, rows = grid.concat_blocks((outputs, numbers), 0)
    return output, rows[..., 0], rows[..., 1]


class Running(NamedTuple):
    """Of a block of queries, over the keys so far: u, z, m, and whether there was a key to attend to."""

    weighted_sum: Array
    total: Array
    row_max: Array | None
    has_key: Array | None


def _attend_sample(grid: Grid, index: Any, stacks: Any) -> Any:
    """Attention of one sample of the batch: outputs and logsumexps of one block of queries after the other."""
    xp, loops, sample, (num_rows, num_keys) = grid.xp, grid.loops, grid.sample_at(index), grid.sizes
    queries, keys = loops.split(sample.query, num_rows), loops.split(sample.key, num_keys)
    blocks = keys, loops.split(sample.value, num_keys, grid.value_part)

    def attend(i: Any, stacks: Any) -> Any:
        rows = loops.block_at(queries, i)
        if grid.plan.exp_without_max:
            rows = xp.multiply(rows, loops.log_base)
        absorb = functools.partial(_absorb, grid, sample, blocks, rows, i)
        if grid.is_one_block:
            state = absorb(grid.may_mask, 0, None)
        else:
            empty = _empty_state(grid, rows) if loops.traced else None
            state = visit_blocks(grid, sample.index, i, absorb, state=empty)
        found = _finish(grid, _empty_state(grid, rows) if state is None else state)
        position = index * grid.counts[0] + i
        return tuple([loops.add_block(stack, position, x) for stack, x in zip(stacks, found, strict=True)])

    return loops.for_each(grid.counts[0], attend, stacks, grid.work)


def _absorb(
    grid: Grid, sample: Sample, blocks: Arrays, rows: Array, i: Any, masked: bool, j: Any, state: Running | None
) -> Running:
    """The running sums after one more block of keys."""
    plan, xp, loops = grid.plan, grid.xp, grid.loops
    keys, values = [loops.block_at(x, j) for x in blocks]
    block = score_block(grid, sample, rows, xp.matrix_transpose(keys), i=i, j=j, masked=masked)
    if plan.exp_without_max:
        new_max, exponentials = None, loops.exp_scaled(block.scores)
    else:
        before = scalar_like(_lowest(rows, xp), rows, xp) if state is None else state.row_max
        new_max = xp.maximum(xp.max(block.scores, axis=-1, keepdims=True), before)
        exponentials = loops.exp_difference(block.scores, new_max)
    total = xp.sum(exponentials, axis=-1, keepdims=True)
    weights = exponentials if grid.call.dropout is None else grid.drop(exponentials, block.at)
    has_key = _has_key(grid, block, total, i, j=j) if plan.may_mask else None
    weighted_sum = matmul_per_group(weights, values, xp)
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
        None if grid.plan.exp_without_max else xp.full_like(total, _lowest(rows, xp)),
        xp.zeros_like(total, dtype=xp.bool) if grid.plan.may_mask else None,
    )


def _finish(grid: Grid, state: Running) -> tuple[Array, Array]:
    """Output of a block of queries, and logsumexp with its remainder (..., 2): 0 and -inf in fully masked rows."""
    xp, dropout, (weighted_sum, total, row_max, has_key) = grid.xp, grid.call.dropout, state
    if has_key is not None:
        total = xp.where(has_key, total, 1.0)
    output = xp.divide(weighted_sum, total)
    output = output if dropout is None else xp.multiply(output, dropout.scale)
    none = None if has_key is None else xp.logical_not(has_key)
    return output, xp.concat(list(log_normalizer(row_max, xp.log(total), none, xp)), axis=-1)


BLOCKWISE = register("blockwise", Operation(forward, backward, empty_results, lasts=lasts))
