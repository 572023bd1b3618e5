"""Attention to pieces of the keys in reproducible arithmetic: merged in any order, they have the bits of the whole.

What is rounded in the whole is rounded relative to two things in which all keys have a say: the largest score of a
query, and the largest magnitude of a channel of the values. So there are two passes over the pieces. The first finds
these (`Extent`), which are merged by maxima. The second adds up integers relative to them (`ExactPartial`), which are
merged by sums. Only then is the quotient rounded (`completed`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attention_core._arithmetic.exact import CARRY, SMALLEST, power_above_max, scalar64, split_carry, to_float64
from attention_core._arithmetic.operations import run
from attention_core._arrays import (
    Array,
    Namespace,
    compute_dtype_name,
    dtype_name,
    on_device_of,
    shape,
    sizes,
    upcast,
    zeros_with,
)
from attention_core._attention.blocks.accumulators import concat_blocks
from attention_core._attention.blocks.grid import batch_entry, make_grid, num_rounds, pad
from attention_core._attention.blocks.plan import Operands, Plan, unpack_operands
from attention_core._attention.blocks.visits import make_visits
from attention_core._attention.call import Call, dropout_scale
from attention_core._attention.reproducible.forward import arrange
from attention_core._attention.reproducible.reduction import (
    Reduction,
    anchor_max,
    averaged,
    divide_by_weight,
    logsumexp_of,
    max_scores,
    query_rows,
    reduce_keys,
    row_accumulator,
)
from attention_core._attention.reproducible.slices import (
    MAX_TOP,
    MIN_TOP,
    Parts,
    as_three_float32,
    from_three_float32,
    needs_carry,
    slice_widths,
    split_columns,
)
from attention_core._backend import Backend, Operation, register

LIMB = 2**20  # sums are integers in three limbs: as int32, 2048 of them can be added up before limbs are carried on


class Extent(NamedTuple):
    """How far scores and values reach, which partials in reproducible arithmetic are relative to.

    Attributes
    ----------
    scores : Array of float32, shape (..., H, M, 3)
        The largest score of each query, in units of 256 ln 2, as the sum of three numbers; -inf where there is none.
    values : Array of float32, shape (..., G, 1, E)
        The largest magnitude of each channel; inf where one of an unmasked call is not finite.
    """

    scores: Array
    values: Array


class ExactPartial(NamedTuple):
    """Attention to some of the keys in reproducible arithmetic, as sums of integers relative to an extent.

    Each sum S is held in limbs, :math:`S = 2^{40} s_1 + 2^{20} s_2 + s_3`.

    Attributes
    ----------
    weights : Array of int32, shape (..., H, M, 3, K)
        Limbs of the sums of weights, K of them: 2, or 1 for types of 16 bits.
    values : Array of int32, shape (..., H, M, 3, J E)
        Limbs of the sums of weighted values, with J = 2 K - 1; three times as many where there is a mask or bias, as
        what is not finite is counted apart.
    extent : Extent
        Of all keys.
    """

    weights: Array
    values: Array
    extent: Extent


def not_differentiated(*_: Any) -> Any:
    """Raise: sums of integers have no slope."""
    raise NotImplementedError("expected partials in reproducible arithmetic not to be differentiated; got them so")


# The first pass: extents


def extent_of(call: Call) -> Extent:
    """The extent of the keys of a call."""
    xp, value = call.xp, upcast(call.value, xp=call.xp)
    *leading, heads, rows, _ = shape(call.query, xp=xp)
    *entries, _, width = shape(value, xp=xp)
    if _is_empty(call):
        scores = xp.full((*leading, heads, rows, 3), -math.inf, dtype=xp.float32, **on_device_of(call.query))
        return Extent(scores, xp.zeros((*entries, 1, width), dtype=xp.float32, **on_device_of(call.query)))
    size = xp.abs(value)
    bounded = xp.less(size, math.inf)
    counts = xp.logical_and(bounded, xp.greater_equal(size, SMALLEST))  # what is subnormal is 0, as in `wide`
    largest = xp.max(xp.where(counts, size, 0.0), axis=-2, keepdims=True)
    if not _is_masked(call):
        largest = xp.where(xp.all(bounded, axis=-2, keepdims=True), largest, math.inf)
    plan, arrays = arrange(call)
    (scores,) = run(EXTENT, plan, *arrays, xp=xp)
    return Extent(xp.reshape(scores, (*leading, heads, rows, 3)), largest)


def _is_empty(call: Call) -> bool:
    """Whether there are no queries or no keys, so that nothing is added up."""
    return 0 in (*sizes(call.query)[:-1], *sizes(call.key)[:-1])


def _is_masked(call: Call) -> bool:
    """Whether something may be masked, behind which what is not finite must not show."""
    return call.mask is not None or call.bias is not None


def _extent_forward(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    tiles = make_grid(plan, arrays, backend)
    xp, loops, visits = tiles.xp, tiles.loops, make_visits(tiles, by_key=False)

    def attend(index: Any, stack: Any) -> Any:
        strip_of = query_rows(tiles, visits, batch_entry(tiles, index))

        def attend_rows(i: Any, stack: Any) -> Any:
            return loops.add_block(
                stack, index * tiles.counts[0] + i, _max_as_three_float32(max_scores(strip_of(i)), xp)
            )

        return loops.loop(0, tiles.counts[0], attend_rows, stack)

    return (concat_blocks(tiles, loops.loop(0, num_rounds(tiles), attend, row_accumulator(tiles, 3, "float32")), 0),)


def _max_as_three_float32(top: Array, xp: Namespace) -> Array:
    """Largest scores as float32, side by side. What is too large either way is told only when all are merged."""
    none = xp.equal(top, -math.inf)
    top = xp.where(xp.logical_or(none, xp.less(xp.abs(top), MIN_TOP)), 0.0, top)
    top = xp.minimum(xp.maximum(top, scalar64(-MAX_TOP, top, xp)), scalar64(MAX_TOP, top, xp))
    return xp.where(none, -math.inf, xp.concat(as_three_float32(top, xp), axis=-1))


def _extent_empty(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    query = unpack_operands(plan, arrays).query
    return (zeros_with(query, *shape(query, xp=backend.namespace)[:-1], 3, xp=backend.namespace),)


EXTENT = register(
    "reproducible.extent", Operation(_extent_forward, not_differentiated, _extent_empty, needs_float64=True)
)


def merge_two_extents(first: Extent, second: Extent, xp: Namespace) -> Extent:
    """The extent of the keys of both. What is rounded to the nearest keeps its order, so parts are compared in turn."""
    parts = [[each.scores[..., place : place + 1] for place in range(3)] for each in (first, second)]
    above: Any = xp.greater(parts[0][2], parts[1][2])
    for place in (1, 0):
        ours, theirs = parts[0][place], parts[1][place]
        above = xp.logical_or(xp.greater(ours, theirs), xp.logical_and(xp.equal(ours, theirs), above))
    scores = xp.where(above, first.scores, second.scores)
    nan = xp.logical_or(xp.isnan(parts[0][0]), xp.isnan(parts[1][0]))
    return Extent(xp.where(nan, math.nan, scores), xp.maximum(first.values, second.values))


# The second pass: sums


def reproducible_partial(call: Call, extent: Extent) -> ExactPartial:
    """The sums of a call's keys relative to an extent."""
    xp = call.xp
    *leading, heads, rows, _ = shape(call.query, xp=xp)
    count = 2 if compute_dtype_name(call.query.dtype) == dtype_name(call.query.dtype) else 1
    width = shape(call.value, xp=xp)[-1]
    if _is_masked(call):
        call, width = _with_nonfinite_counts(call), 3 * width
    lasts = (count, (2 * count - 1) * width)
    if _is_empty(call):
        weights, values = (
            xp.zeros((*leading, heads, rows, 3, last), dtype=xp.int32, **on_device_of(call.query)) for last in lasts
        )
        return ExactPartial(weights, values, extent)
    plan, arrays = arrange(call)
    query = unpack_operands(plan, arrays).query
    entries, groups, times, *_ = shape(query, xp=xp)
    scores = xp.reshape(extent.scores, (entries, groups, times, rows, 3))
    values = xp.reshape(_all_extents(extent.values, call, xp), (entries, groups, 1, width))
    found = run(SUMS, plan, *arrays, scores, values, xp=xp)
    weights, values = (xp.reshape(x, (*leading, heads, rows, 3, last)) for x, last in zip(found, lasts, strict=True))
    return ExactPartial(weights, values, extent)


def _with_nonfinite_counts(call: Call) -> Call:
    """The call with, beside the finite values, where something pulls an average up, and where something pulls it down.

    Both are told by 1/2, whose extent is 1/2 too.
    """
    xp, value = call.xp, call.value
    nan = xp.isnan(value)
    pulls = (
        xp.multiply(xp.astype(xp.logical_or(nan, xp.equal(value, end)), value.dtype), 0.5)
        for end in (math.inf, -math.inf)
    )
    return call._replace(value=xp.concat([xp.where(xp.isfinite(value), value, 0.0), *pulls], axis=-1))


def _all_extents(values: Array, call: Call, xp: Namespace) -> Array:
    """The extents of the channels of `_counted` values."""
    if not _is_masked(call):
        return values
    return xp.concat([values, *[xp.full_like(values, 0.5)] * 2], axis=-1)


def _sums_forward(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    tiles = make_grid(plan, arrays[:-2], backend)
    xp, carry = tiles.xp, needs_carry(tiles, 1)
    scores, values = (to_float64(each, xp) for each in arrays[-2:])
    tops = from_three_float32(scores, xp)
    if tiles.loops.traced:
        spare = shape(tiles.operands.query, xp=xp)[-2] - tiles.lengths[0]
        tops = pad(tops, -2, spare, xp)

    def close(top: Array, power: Array, sums: Parts, mass: Parts) -> tuple[Array, ...]:
        return tuple(xp.concat(_limbs(parts, carry, xp), axis=-1) for parts in (mass, sums))

    widths = _limb_widths(plan, tiles.operands, xp)
    return reduce_keys(
        tiles, Reduction(close, widths, "int32", lambda each: each, (tops, power_above_max(values, -2, xp)))
    )


def _limb_widths(plan: Plan, operands: Operands, xp: Namespace) -> tuple[Any, Any]:
    count = plan.num_slices
    return 3 * count, 3 * (2 * count - 1) * shape(operands.value, xp=xp)[-1]


def _limbs(parts: Parts, carry: bool, xp: Namespace) -> list[Array]:
    """Exact sums side by side, as int32: all first limbs, all second ones, and all third ones, the latter two positive.

    Where something is nan, first limbs are so far below 0 as no sum of weights is.
    """
    pairs = zip(parts[::2], parts[1::2], strict=True) if carry else (split_carry(each, xp) for each in parts)
    high, low = (xp.concat(list(each), axis=-1) for each in zip(*pairs, strict=True))
    rest, third = _divmod_limb(low, xp)
    first, second = _divmod_limb(xp.add(xp.multiply(high, CARRY / LIMB), rest), xp)
    nan = xp.isnan(high)
    limbs = zip((first, second, third), (-float(LIMB), 0.0, 0.0), strict=True)
    return [xp.astype(xp.where(nan, instead, each), xp.int32) for each, instead in limbs]


def _divmod_limb(x: Array, xp: Namespace) -> tuple[Array, Array]:
    """Quotient and remainder by the size of a limb, of integers: products by powers of two are exact."""
    quotient = xp.floor(xp.multiply(x, 1 / LIMB))
    return quotient, xp.subtract(x, xp.multiply(quotient, float(LIMB)))


def _sums_empty(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp, operands = backend.namespace, unpack_operands(plan, arrays)
    dims = shape(operands.query, xp=xp)[:-1]
    return tuple(
        xp.zeros((*dims, last), dtype=xp.int32, **on_device_of(operands.query))
        for last in _limb_widths(plan, operands, xp)
    )


SUMS = register("reproducible.sums", Operation(_sums_forward, not_differentiated, _sums_empty, needs_float64=True))


def merge_sums(first: Array, second: Array, xp: Namespace) -> Array:
    """Sums in limbs (..., 3, K), with what a limb cannot hold carried on to the one before."""
    limbs = xp.add(first, second)
    high, middle, low = (limbs[..., place, :] for place in range(3))
    middle = xp.add(middle, xp.floor_divide(low, LIMB))
    high = xp.add(high, xp.floor_divide(middle, LIMB))
    return xp.stack([high, xp.remainder(middle, LIMB), xp.remainder(low, LIMB)], axis=-2)


# The quotient


class Closing(NamedTuple):
    """The plan of what makes sums of integers an average."""

    factor: float
    pulled: bool  # whether what is not finite was counted apart


register("Closing", Closing)


def complete_exactly(partial: ExactPartial, dropout: Any, xp: Namespace) -> tuple[Array, Array]:
    """Output and logsumexp."""
    weights, values, (scores, extents) = partial
    *leading, heads, rows, _, count = shape(weights, xp=xp)
    groups, _, width = shape(extents, xp=xp)[-3:]
    entries = math.prod(leading)
    total_width = shape(values, xp=xp)[-1] // (2 * count - 1)
    dims = (entries, groups, heads // groups, rows)
    arrays = (
        xp.reshape(weights, (*dims, 3, count)),
        xp.reshape(values, (*dims, 3, shape(values, xp=xp)[-1])),
        xp.reshape(scores, (*dims, 3)),
        xp.reshape(extents, (entries, groups, 1, width)),
    )
    plan = Closing(dropout_scale(dropout), total_width != width)
    output, logsumexp = run(CLOSING, plan, *arrays, xp=xp)
    return xp.reshape(output, (*leading, heads, rows, width)), xp.reshape(logsumexp, (*leading, heads, rows))


def _closing_forward(plan: Closing, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp = backend.namespace
    weights, values, scores, extents = arrays
    count, width = shape(weights, xp=xp)[-1], shape(extents, xp=xp)[-1]
    power = power_above_max(to_float64(extents, xp), -2, xp)
    if plan.pulled:
        power = xp.concat([power, *[xp.ones_like(power)] * 2], axis=-1)
    sums = split_columns(_from_limbs(values, xp), slice_widths(shape(power, xp=xp)[-1], count, False))
    mass = split_columns(_from_limbs(weights, xp), [1] * count)
    average, weight = averaged(sums, mass, power, xp)
    top = anchor_max(from_three_float32(to_float64(scores, xp), xp), xp)
    weight = xp.where(xp.logical_or(xp.isnan(top), xp.less(weight, 0.0)), math.nan, weight)
    output = divide_by_weight(average, weight, plan.factor, xp)
    if plan.pulled:
        output, ups, downs = (output[..., place * width : (place + 1) * width] for place in range(3))
        up, down = xp.greater(ups, 0.0), xp.greater(downs, 0.0)
        output = xp.where(up, math.inf, xp.where(down, -math.inf, output))
        output = xp.where(xp.logical_and(up, down), math.nan, output)
    return output, xp.squeeze(logsumexp_of(top, weight, xp), axis=-1)


def _from_limbs(x: Array, xp: Namespace) -> Array:
    """Sums in limbs (..., 3, K) rounded once to float64: of two numbers that are added, each is exact."""
    first, second, third = (xp.astype(x[..., place, :], xp.float64) for place in range(3))
    return xp.add(xp.multiply(xp.add(xp.multiply(first, float(LIMB)), second), float(LIMB)), third)


def _closing_empty(plan: Closing, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp = backend.namespace
    *dims, _ = shape(arrays[2], xp=xp)
    return (
        zeros_with(arrays[2], *dims, shape(arrays[3], xp=xp)[-1], xp=xp),
        zeros_with(arrays[2], *dims, xp=xp),
    )


CLOSING = register(
    "reproducible.complete", Operation(_closing_forward, not_differentiated, _closing_empty, needs_float64=True)
)
