r"""Attention in reproducible arithmetic, over the blocks of `_tiles`.

Scores are held in the units of `exp2_weight`, :math:`t_{ij} = s_{ij} / (256 \ln 2)`. Each is a sum of three products of
slices, of which the larger one and the sum of the smaller two are exact; the two are added with one rounding. A first
pass over the keys finds the largest score, a second one the weights

.. math:: w_{ij} = 2^{256 (t_{ij} - \max_j t_{ij})}

as two integers of 18 bits, and adds up products of these with slices of the values, exactly: so neither the order of
blocks nor their size shows. In types of 16 bits one slice of each number does, and one integer of 24 bits for a weight.

Backward, the weights are computed relative to :math:`\ell_i / (256 \ln 2)` less a power of two, such that none exceeds
4 / 3, and what they are multiplied by holds the rest. The slopes :math:`\bar s_{ij}` are cut into slices of their own,
below a bound that holds for a whole row, so that no pass over them has to come first.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from attention_core._arithmetic.elementary import log2
from attention_core._arithmetic.exact import power_above
from attention_core._arrays import Array, Namespace, dtype_name, on_device_of, shape, zeros_with
from attention_core._attention.blocks.grid import Grid, dropout_of, make_grid
from attention_core._attention.blocks.nonfinite import with_nonfinite_values
from attention_core._attention.blocks.plan import Plan, make_plan, unpack_operands
from attention_core._attention.call import Call, dropout_scale, upcast_call
from attention_core._attention.reproducible.reduction import (
    Reduction,
    averaged,
    divide_by_weight,
    logsumexp_of,
    reduce_keys,
)
from attention_core._attention.reproducible.slices import Parts, as_three_float32, needs_carry, without_carry
from attention_core._backend import Backend


def arrange(call: Call) -> tuple[Plan, tuple[Array, ...]]:
    """A call as a plan and the arrays of its operands."""
    xp = call.xp
    count = 2 if dtype_name(call.query.dtype) == "float32" else 1
    call = upcast_call(call)
    width = shape(call.query, xp=xp)[-1]
    if isinstance(width, int) and width == 0:  # all scores are 0, as they are where there is one channel of zeros
        query, key = (
            xp.zeros((*shape(x, xp=xp)[:-1], 1), dtype=x.dtype, **on_device_of(x)) for x in (call.query, call.key)
        )
        call, width = call._replace(query=query, key=key), 1
    scale = 1 / math.sqrt(width) if call.scale is None else float(call.scale)
    call = call._replace(softcap=None if call.softcap is None else float(call.softcap))
    plan, operands = make_plan(call, num_slices=count, score_scale=scale)
    return plan, operands.arrays()


def forward(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, Array, Array]:
    """Output (B, G, R, M, E), logsumexp (B, G, R, M), and what `backward` needs of each row, (B, G, R, M, 4)."""
    tiles = make_grid(plan, arrays, backend)
    return with_nonfinite_values(
        tiles, functools.partial(_forward, tiles), lambda: empty_results(plan, arrays, backend)
    )


def _forward(tiles: Grid, part: Any) -> tuple[Array, Array, Array]:
    xp, dropout = tiles.xp, dropout_of(tiles)

    def close(top: Array, power: Array, sums: Parts, mass: Parts) -> tuple[Array, ...]:
        carry = needs_carry(tiles, 1)
        return *averaged(without_carry(sums, carry, xp), without_carry(mass, carry, xp), power, xp), top

    width = shape(tiles.operands.value, xp=xp)[-1]
    average, weight, top = reduce_keys(tiles, Reduction(close, (width, 1, 1), "float64", part))
    logsumexp = xp.squeeze(logsumexp_of(top, weight, xp), axis=-1)
    return divide_by_weight(average, weight, dropout_scale(dropout), xp), logsumexp, backward_reference(top, weight, xp)


def backward_reference(top: Array, weight: Array, xp: Namespace) -> Array:
    r"""Of the backward pass's reference three parts, and a power of two.

    With :math:`z_i = \sum_j w_{ij}` and a power of two :math:`2^{c_i}` within a third of it, the reference is
    :math:`r_i = \max_j t_{ij} + \log_2 (z_i 2^{-c_i}) / 256`, and p is :math:`2^{256 (t_{ij} - r_i)} 2^{-c_i}`.
    """
    none = xp.equal(weight, 0.0)
    mass = xp.where(none, 1.0, weight)
    power = xp.multiply(power_above(mass, xp), 0.5)
    reference = xp.add(top, xp.multiply(log2(xp.divide(mass, power), xp), 1 / 256))
    parts = as_three_float32(xp.where(none, 0.0, reference), xp)
    return xp.concat([*parts, xp.astype(xp.divide(1.0, power), xp.float32)], axis=-1)


def empty_results(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, Array, Array]:
    """Arrays like those of `forward`, for compilers that ask for shapes alone."""
    xp, operands = backend.namespace, unpack_operands(plan, arrays)
    *dims, _ = shape(operands.query, xp=xp)
    width = shape(operands.value, xp=xp)[-1]
    return (
        zeros_with(operands.query, *dims, width, xp=xp),
        zeros_with(operands.query, *dims, xp=xp),
        zeros_with(operands.query, *dims, 4, xp=xp),
    )
