"""Attention to pieces of the keys in reproducible arithmetic: merged in any order, they have the bits of the whole.

Two maxima over all keys decide how the whole is rounded: the largest score of a query, and the largest magnitude of a
channel of the values. So there are two passes over the pieces. The first finds these maxima (`Extent`). The second adds
up integers relative to them (`ExactPartial`), which are merged by sums. `complete_exactly` then divides and rounds.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attention_core._arithmetic import exact
from attention_core._arithmetic.elementary import log2
from attention_core._arithmetic.exact import CARRY, SMALLEST, join_carry, power_above_max, split_carry, to_float64
from attention_core._arithmetic.operations import run
from attention_core._arrays import (
    Array,
    Namespace,
    compute_dtype_name,
    dtype_name,
    on_device_of,
    scalar_like,
    shape,
    upcast,
    zeros_with,
)
from attention_core._attention.blocks.grid import make_grid
from attention_core._attention.blocks.plan import Operands, Plan, unpack_operands
from attention_core._attention.call import Call, dropout_scale, has_no_pairs
from attention_core._attention.finite import infinities, nonfinite_indicators
from attention_core._attention.reproducible import slices
from attention_core._attention.reproducible.forward import arrange
from attention_core._attention.reproducible.reduction import (
    QueryRows,
    SlicedValues,
    Sums,
    anchor_max,
    divide_by_weight,
    for_each_rows,
    logsumexp_of,
    max_scores,
    reduce_keys,
    weighted_totals,
)
from attention_core._attention.reproducible.slices import Parts
from attention_core._backend import Backend, Operation, register

LIMB = 2**20  # sums are integers in three limbs of 20 bits: int32 holds the sum of 2048 limbs


class Extent(NamedTuple):
    """The largest scores and values, which partials in reproducible arithmetic are relative to.

    Attributes
    ----------
    scores : Array of float32, shape (..., H, M, 3)
        The largest score of each query, in units of 256 ln 2, as the sum of three numbers; -inf for fully masked rows.
    values : Array of float32, shape (..., G, 1, E)
        The largest finite magnitude of each channel; inf where an unmasked call has a value that is not finite.
    """

    scores: Array
    values: Array


class ExactPartial(NamedTuple):
    """Attention to some of the keys in reproducible arithmetic, as sums of integers relative to an extent.

    Each sum S is held in limbs, :math:`S = 2^{40} s_1 + 2^{20} s_2 + s_3`.

    Attributes
    ----------
    weights : Array of int32, shape (..., H, M, 3, K)
        Limbs of the sums of weights, K of them: 3, or 1 for types of 16 bits.
    values : Array of int32, shape (..., H, M, 3, J E)
        Limbs of the sums of weighted values, with J = 6, or 1. Three times as many where there is a mask or bias, as
        values that are not finite are counted separately.
    extent : Extent
        Of all keys.
    """

    weights: Array
    values: Array
    extent: Extent


def not_differentiated(*_: Any) -> Any:
    """Raise: sums of integers have no gradient."""
    raise NotImplementedError("expected partials in reproducible arithmetic not to be differentiated; got them so")


# The first pass: extents


def extent_of(call: Call) -> Extent:
    """The extent of the keys of a call."""
    xp, value = call.xp, upcast(call.value, xp=call.xp)
    *leading, heads, rows, _ = shape(call.query, xp=xp)
    *outer, _, width = shape(value, xp=xp)
    if has_no_pairs(call):
        scores = xp.full((*leading, heads, rows, 3), -math.inf, dtype=xp.float32, **on_device_of(call.query))
        return Extent(scores, xp.zeros((*outer, 1, width), dtype=xp.float32, **on_device_of(call.query)))
    size = xp.abs(value)
    bounded = xp.less(size, math.inf)
    counted = xp.logical_and(bounded, xp.greater_equal(size, SMALLEST))  # subnormal values are 0, as in `to_float64`
    largest = xp.max(xp.where(counted, size, 0.0), axis=-2, keepdims=True)
    if not _may_be_masked(call):
        largest = xp.where(xp.all(bounded, axis=-2, keepdims=True), largest, math.inf)
    plan, arrays = arrange(call)
    (scores,) = run(EXTENT, plan, *arrays, xp=xp)
    return Extent(xp.reshape(scores, (*leading, heads, rows, 3)), largest)


def _may_be_masked(call: Call) -> bool:
    """Whether values may be masked, so that those that are not finite must not show."""
    return call.mask is not None or call.bias is not None


def _extent_forward(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    grid = make_grid(plan, unpack_operands(plan, arrays), backend)

    def row_max(rows: QueryRows, _: None) -> tuple[Array, ...]:
        return (_max_as_three_float32(max_scores(rows), grid.xp),)

    return for_each_rows(grid, row_max, grid.row_stacks(3))


def _max_as_three_float32(row_max: Array, xp: Namespace) -> Array:
    """Row maxima as float32 numbers side by side; those above float32 become nan once all pieces are merged."""
    none = xp.equal(row_max, -math.inf)
    row_max = xp.where(xp.logical_or(none, xp.less(xp.abs(row_max), slices.MIN_TOP)), 0.0, row_max)
    highest = scalar_like(slices.MAX_TOP, row_max, xp)
    row_max = xp.minimum(xp.maximum(row_max, xp.negative(highest)), highest)
    return xp.where(none, -math.inf, xp.concat(exact.as_three_float32(row_max, xp), axis=-1))


def _extent_abstract(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    query = unpack_operands(plan, arrays).query
    return (zeros_with(query, *shape(query, xp=backend.namespace)[:-1], 3, xp=backend.namespace),)


EXTENT = register(
    "reproducible.extent", Operation(_extent_forward, not_differentiated, _extent_abstract, needs_float64=True)
)


def merge_two_extents(first: Extent, second: Extent, xp: Namespace) -> Extent:
    """The extent of the keys of both.

    The three parts of a score are compared in turn: rounding to the nearest keeps the order of the first parts, then
    that of the second ones.
    """
    parts = [[extent.scores[..., n : n + 1] for n in range(3)] for extent in (first, second)]
    above: Any = xp.greater(parts[0][2], parts[1][2])
    for ours, theirs in ((parts[0][1], parts[1][1]), (parts[0][0], parts[1][0])):
        above = xp.logical_or(xp.greater(ours, theirs), xp.logical_and(xp.equal(ours, theirs), above))
    scores = xp.where(above, first.scores, second.scores)
    nan = xp.logical_or(xp.isnan(parts[0][0]), xp.isnan(parts[1][0]))
    return Extent(xp.where(nan, math.nan, scores), xp.maximum(first.values, second.values))


# The second pass: sums


def reproducible_partial(call: Call, extent: Extent) -> ExactPartial:
    """The sums of a call's keys relative to an extent."""
    xp = call.xp
    *leading, heads, rows, _ = shape(call.query, xp=xp)
    lasts, width = _lasts(call), shape(call.value, xp=xp)[-1]
    if _may_be_masked(call):
        call, width = _with_nonfinite_indicators(call), 3 * width
    if has_no_pairs(call):
        weights, values = (
            xp.zeros((*leading, heads, rows, 3, last), dtype=xp.int32, **on_device_of(call.query)) for last in lasts
        )
        return ExactPartial(weights, values, extent)
    plan, arrays = arrange(call)
    query = unpack_operands(plan, arrays).query
    batch, num_kv_heads, group_size, *_ = shape(query, xp=xp)
    scores = xp.reshape(extent.scores, (batch, num_kv_heads, group_size, rows, 3))
    values = xp.reshape(_all_extents(extent.values, call, xp), (batch, num_kv_heads, 1, width))
    sums = run(SUMS, plan, *arrays, scores, values, xp=xp)
    weights, values = (xp.reshape(x, (*leading, heads, rows, 3, last)) for x, last in zip(sums, lasts, strict=True))
    return ExactPartial(weights, values, extent)


def _with_nonfinite_indicators(call: Call) -> Call:
    """The call with values (..., N, 3 E): the finite ones, and where one counts as inf, or as -inf.

    The sums of the latter two tell whether inf or -inf was attended to. Both are indicated by 1/2, so their extent is
    1/2 too.
    """
    xp, value = call.xp, call.value
    indicators = (xp.multiply(indicator, 0.5) for indicator in nonfinite_indicators(value, xp))
    return call._replace(value=xp.concat([xp.where(xp.isfinite(value), value, 0.0), *indicators], axis=-1))


def _all_extents(values: Array, call: Call, xp: Namespace) -> Array:
    """The extents of the channels of `_with_nonfinite_indicators`."""
    if not _may_be_masked(call):
        return values
    return xp.concat([values, *[xp.full_like(values, 0.5)] * 2], axis=-1)


def _sums_forward(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    grid = make_grid(plan, unpack_operands(plan, arrays[:-2]), backend)
    xp, carry = grid.xp, slices.needs_carry(grid, 1)
    scores, values = (to_float64(x, xp) for x in arrays[-2:])
    row_max = slices.pad_rows(grid, exact.from_three_float32(scores, xp))

    def finish(_: SlicedValues, sums: Sums) -> tuple[Array, ...]:
        return tuple(xp.concat(_limbs(parts, carry, xp), axis=-1) for parts in (sums.weights, sums.values))

    extent, widths = (row_max, power_above_max(values, -2, xp)), _limb_widths(plan, grid.operands, xp)
    return reduce_keys(grid, finish, grid.row_stacks(*widths, dtype="int32"), extent)


def _numbers(count: int, width: Any) -> tuple[Any, Any]:
    """How many sums of weights and of weighted values a query has, with so many slices of a value."""
    return slices.WEIGHT_SLICES[count], slices.WEIGHT_SLICES[count] * count * width


def _lasts(call: Call) -> tuple[Any, Any]:
    """The same, of a call."""
    count = 2 if compute_dtype_name(call.query.dtype) == dtype_name(call.query.dtype) else 1  # slices of a value
    return _numbers(count, shape(call.value, xp=call.xp)[-1] * (3 if _may_be_masked(call) else 1))


def num_limbs(call: Call) -> int:
    """How many limbs the sums of a query have."""
    return 3 * int(sum(_lasts(call)))


def _limb_widths(plan: Plan, operands: Operands, xp: Namespace) -> tuple[Any, Any]:
    weights, values = _numbers(plan.num_slices, shape(operands.value, xp=xp)[-1])
    return 3 * weights, 3 * values


def _limbs(parts: Parts, carry: bool, xp: Namespace) -> list[Array]:
    """Exact sums in three limbs of int32: all first limbs, all second ones, all third ones.

    Second and third limbs are positive. For nan, the first limb is more negative than that of any sum of weights.
    """
    pairs = zip(parts[::2], parts[1::2], strict=True) if carry else (split_carry(part, xp) for part in parts)
    high, low = (xp.concat(list(halves), axis=-1) for halves in zip(*pairs, strict=True))
    rest, third = _divmod_limb(low, xp)
    first, second = _divmod_limb(xp.add(xp.multiply(high, CARRY / LIMB), rest), xp)
    nan = xp.isnan(high)
    limbs = zip((first, second, third), (-float(LIMB), 0.0, 0.0), strict=True)
    return [xp.astype(xp.where(nan, of_nan, limb), xp.int32) for limb, of_nan in limbs]


def _divmod_limb(x: Array, xp: Namespace) -> tuple[Array, Array]:
    """Quotient and remainder of integers by the size of a limb: products by powers of two are exact."""
    quotient = xp.floor(xp.multiply(x, 1 / LIMB))
    return quotient, xp.subtract(x, xp.multiply(quotient, float(LIMB)))


def _sums_abstract(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp, operands = backend.namespace, unpack_operands(plan, arrays)
    dims = shape(operands.query, xp=xp)[:-1]
    return tuple(
        xp.zeros((*dims, last), dtype=xp.int32, **on_device_of(operands.query))
        for last in _limb_widths(plan, operands, xp)
    )


SUMS = register("reproducible.sums", Operation(_sums_forward, not_differentiated, _sums_abstract, needs_float64=True))


def merge_sums(first: Array, second: Array, xp: Namespace) -> Array:
    """Sums in limbs (..., 3, K), added; what exceeds a limb is carried to the one above."""
    limbs = xp.add(first, second)
    high, middle, low = (limbs[..., n, :] for n in range(3))
    middle = xp.add(middle, xp.floor_divide(low, LIMB))
    high = xp.add(high, xp.floor_divide(middle, LIMB))
    return xp.stack([high, xp.remainder(middle, LIMB), xp.remainder(low, LIMB)], axis=-2)


# Division and rounding


class Completion(NamedTuple):
    """The plan of the division. Saved programs hold the names of its fields."""

    factor: float  # the output is multiplied by it, to compensate for dropout
    counts_nonfinite: bool  # whether the sums have indicators of values that are not finite


register("Completion", Completion)


def complete_exactly(partial: ExactPartial, dropout: Any, xp: Namespace) -> tuple[Array, Array]:
    """Output and logsumexp."""
    weights, values, (scores, extents) = partial
    *leading, heads, rows, _, num_weights = shape(weights, xp=xp)
    num_kv_heads, _, width = shape(extents, xp=xp)[-3:]
    batch, num_values = math.prod(leading), shape(values, xp=xp)[-1]
    dims = (batch, num_kv_heads, heads // num_kv_heads, rows)
    arrays = (
        xp.reshape(weights, (*dims, 3, num_weights)),
        xp.reshape(values, (*dims, 3, num_values)),
        xp.reshape(scores, (*dims, 3)),
        xp.reshape(extents, (batch, num_kv_heads, 1, width)),
    )
    plan = Completion(dropout_scale(dropout), num_values != _numbers(_count(num_weights), width)[1])
    output, logsumexp = run(COMPLETE, plan, *arrays, xp=xp)
    return xp.reshape(output, (*leading, heads, rows, width)), xp.reshape(logsumexp, (*leading, heads, rows))


def _count(num_weights: int) -> int:
    """How many slices a value has, by how many a weight has."""
    return next(count for count, number in slices.WEIGHT_SLICES.items() if number == num_weights)


def _complete_forward(plan: Completion, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp = backend.namespace
    weights, values, scores, extents = arrays
    num_weights, width = shape(weights, xp=xp)[-1], shape(extents, xp=xp)[-1]
    count = _count(num_weights)
    power = power_above_max(to_float64(extents, xp), -2, xp)
    if plan.counts_nonfinite:
        power = xp.concat([power, *[xp.ones_like(power)] * 2], axis=-1)
    widths = slices.value_widths(shape(power, xp=xp)[-1], count, False)
    pairs = zip(*(slices.split_columns(half, widths) for half in _carried(values, xp)), strict=True)
    value_sums = tuple(half for pair in pairs for half in pair)
    weight_sums = slices.split_columns(join_carry(_carried(weights, xp), xp), [1] * num_weights)
    total, weight = weighted_totals(value_sums, weight_sums, power, count=count, carry=True, xp=xp)
    anchor = anchor_max(exact.from_three_float32(to_float64(scores, xp), xp), xp)
    weight = xp.where(xp.logical_or(xp.isnan(anchor), xp.less(weight, 0.0)), math.nan, weight)
    output = divide_by_weight(total, weight, plan.factor, xp)
    if plan.counts_nonfinite:
        output = _show_nonfinite(output, width, xp)
    none = xp.equal(weight, 0.0)
    logarithm = log2(xp.where(none, 1.0, weight), xp)
    return output, xp.squeeze(logsumexp_of(anchor, logarithm, none, xp=xp), axis=-1)


def _show_nonfinite(output: Array, width: Any, xp: Namespace) -> Array:
    """Averages of finite values, replaced by inf, -inf or nan where such a value was attended to."""
    output, *indicators = (output[..., n * width : (n + 1) * width] for n in range(3))
    attended_inf, attended_minus_inf = (xp.greater(indicator, 0.0) for indicator in indicators)
    shown = infinities(attended_inf, attended_minus_inf, output, xp)
    return xp.where(xp.logical_or(attended_inf, attended_minus_inf), shown, output)


def _carried(x: Array, xp: Namespace) -> tuple[Array, Array]:
    """Sums in limbs (..., 3, K) as high and low parts, both exact, as `split_carry` has them."""
    first, second, third = (xp.astype(x[..., n, :], xp.float64) for n in range(3))
    high = xp.multiply(xp.add(xp.multiply(first, float(LIMB)), second), LIMB / CARRY)
    return high, third


def _complete_abstract(plan: Completion, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp = backend.namespace
    *dims, _ = shape(arrays[2], xp=xp)
    width = shape(arrays[3], xp=xp)[-1]
    return zeros_with(arrays[2], *dims, width, xp=xp), zeros_with(arrays[2], *dims, xp=xp)


COMPLETE = register(
    "reproducible.complete", Operation(_complete_forward, not_differentiated, _complete_abstract, needs_float64=True)
)
