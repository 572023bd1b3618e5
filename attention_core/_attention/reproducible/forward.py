r"""The forward pass in reproducible arithmetic, block by block.

Scores are held in the units of `exp2_weight`, :math:`t_{ij} = s_{ij} / (256 \ln 2)`. Each is a sum of three products of
slices: the largest one is exact, the sum of the two smaller ones is exact, and adding both rounds once. A first pass
over the keys finds the row maximum. A second one computes the weights

.. math:: w_{ij} = 2^{256 (t_{ij} - \max_j t_{ij})}

as three integers of 18 bits each. Sums of their products with both slices of the values are exact, so neither the order
of blocks nor their size shows. The sums of each integer with all bits of the values are rounded together. So masked
values do not show either, although the power of two that values are cut by is above them, too. For 16-bit types, one
slice of each number suffices, and one integer of 24 bits for a weight.
"""

from __future__ import annotations

import math

from attention_core._arithmetic.elementary import split_log2
from attention_core._arithmetic.exact import as_three_float32
from attention_core._arrays import Array, Arrays, Namespace, dtype_name, on_device_of, shape, zeros_with
from attention_core._attention.blocks.forward import empty_results as empty_results_of_blocks
from attention_core._attention.blocks.grid import Grid, make_grid
from attention_core._attention.blocks.nonfinite import with_nonfinite_values
from attention_core._attention.blocks.plan import Plan, make_plan, unpack_operands
from attention_core._attention.call import Call, dropout_scale, upcast_call
from attention_core._attention.reproducible import slices
from attention_core._attention.reproducible.backward import backward
from attention_core._attention.reproducible.reduction import (
    SlicedValues,
    Sums,
    divide_by_weight,
    logsumexp_of,
    reduce_keys,
    weighted_totals,
)
from attention_core._backend import Backend, Operation, register


def reproducible_attention(
    call: Call, group: str | None = None, num_queries: int | None = None
) -> tuple[Array, Array, Array]:
    """Output (..., H, M, E) and logsumexp (..., H, M) in float32, of which every library computes the same bits.

    The third result is `backward_reference`, (B, G, R, M, 4). A group of ranks may share the queries, so many in all:
    each has all keys, and gets their whole gradients.
    """
    xp, (plan, arrays) = call.xp, arrange(call)
    plan = plan._replace(group=group, num_queries=num_queries)
    output, logsumexp, reference = call.backend.custom_gradient(REPRODUCIBLE, plan, arrays)
    *dims, _ = shape(call.query, xp=xp)
    return xp.reshape(output, (*dims, shape(call.value, xp=xp)[-1])), xp.reshape(logsumexp, tuple(dims)), reference


def arrange(call: Call) -> tuple[Plan, Arrays]:
    """The plan of a call, and the arrays of its operands."""
    xp, dtype, call = call.xp, call.query.dtype, upcast_call(call)
    num_slices = 2 if dtype_name(dtype) == "float32" else 1
    width = shape(call.query, xp=xp)[-1]
    if isinstance(width, int) and width == 0:  # all scores are 0, as with one channel of zeros
        query, key = (
            xp.zeros((*shape(x, xp=xp)[:-1], 1), dtype=x.dtype, **on_device_of(x)) for x in (call.query, call.key)
        )
        call, width = call._replace(query=query, key=key), 1
    scale = 1 / math.sqrt(width) if call.scale is None else float(call.scale)
    call = call._replace(softcap=None if call.softcap is None else float(call.softcap))
    plan, operands = make_plan(call, num_slices=num_slices, score_scale=scale)
    return plan, operands.arrays()


def forward(plan: Plan, arrays: Arrays, backend: Backend) -> tuple[Array, Array, Array]:
    """Output (B, G, R, M, E), logsumexp (B, G, R, M), and `backward_reference` (B, G, R, M, 4)."""
    grid = make_grid(plan, unpack_operands(plan, arrays), backend)
    if plan.all_finite:
        return _forward(grid)
    return with_nonfinite_values(grid, _forward, lambda: empty_results(plan, arrays, backend))


def _forward(grid: Grid) -> tuple[Array, Array, Array]:
    xp, carry = grid.xp, slices.needs_carry(grid, 1)

    def finish(values: SlicedValues, sums: Sums) -> Arrays:
        weights = slices.without_carry(sums.weights, carry, xp)
        count = grid.plan.num_slices
        return *weighted_totals(sums.values, weights, values.power, count=count, carry=carry, xp=xp), sums.anchor

    total, weight, anchor = reduce_keys(grid, finish, grid.row_stacks(grid.width, 1, 1, dtype="float64"))
    output = divide_by_weight(total, weight, dropout_scale(grid.dropout), xp)
    none = xp.equal(weight, 0.0)
    power, exponent, fraction = split_log2(xp.where(none, 1.0, weight), xp)
    logsumexp = xp.squeeze(logsumexp_of(anchor, xp.add(exponent, fraction), none, xp=xp), axis=-1)
    return output, logsumexp, backward_reference(anchor, power, fraction, none=none, xp=xp)


def backward_reference(anchor: Array, power: Array, fraction: Array, *, none: Array, xp: Namespace) -> Array:
    r"""The reference of the backward pass, as three float32 numbers, and the inverse of a power of two.

    Let :math:`2^{c_i}` be a power of two within a third of :math:`z_i = \sum_j w_{ij}`. The reference is
    :math:`r_i = \max_j t_{ij} + \log_2 (z_i 2^{-c_i}) / 256`, and the softmax is
    :math:`p_{ij} = 2^{256 (t_{ij} - r_i)} 2^{-c_i}`.
    Here, ``power`` is twice that, and ``fraction`` that of `split_log2`.
    """
    reference = xp.add(anchor, xp.multiply(xp.add(fraction, 1.0), 1 / 256))
    parts = as_three_float32(xp.where(none, 0.0, reference), xp)
    return xp.concat([*parts, xp.astype(xp.divide(2.0, power), xp.float32)], axis=-1)


def empty_results(plan: Plan, arrays: Arrays, backend: Backend) -> tuple[Array, Array, Array]:
    """Zeros of the shapes and dtypes of `forward`."""
    output, logsumexp, _ = empty_results_of_blocks(plan, arrays, backend)
    return output, logsumexp, zeros_with(output, *shape(logsumexp, xp=backend.namespace), 4, xp=backend.namespace)


REPRODUCIBLE = register("reproducible", Operation(forward, backward, empty_results, needs_float64=True))
