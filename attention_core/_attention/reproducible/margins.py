r"""A cheap test of which queries may need more slices than the two of every weight.

Two slices of a weight are off by up to :math:`2^{-36.6}` of the largest weight of the row, however small it is itself.
So a sum of weighted values is accurate where :math:`\sum_j w_{ij} |v_{je}|` is at least :math:`\tau = 2^{-7}` times
:math:`\sum_j |v_{je}|`, over the keys that the query may attend to. `refinement` decides that by exact sums, of three
bits of each magnitude.

Here, sums of :math:`(w_{ij} - \tau) |v_{je}|` in float32 tell which queries are clearly above the bound, as nearly all
are. Their rounding depends on the library, without any effect: :math:`\tau` is larger by a sixteenth here, so a query
in doubt only costs time.
"""

from __future__ import annotations

import functools
from typing import Any

from attention_core._arithmetic.exact import PRECISION
from attention_core._arrays import Array, Namespace, on_device_of, shape
from attention_core._attention.blocks.grid import Grid, cached_by_distance, dropout_of, num_heads_of
from attention_core._attention.blocks.scores import matmul_per_group
from attention_core._attention.call import apply_dropout
from attention_core._attention.reproducible.block import ExactScoreBlock
from attention_core._attention.reproducible.slices import SCORE_UNIT, WEIGHT_BITS
from attention_core._backend import is_concrete

LOG_TAU = -7
FILTER = 2.0**LOG_TAU * 17 / 16
WEIGHT_UNIT = 2.0 ** WEIGHT_BITS[2]
LEAST_MAGNITUDE = 2.0**-15  # over the power of two above the channel: smaller values count as 0
LEAST_CREDIT = 2.0**-10  # in the bound, for each of these: covers the bits of them that no slice holds


def value_magnitudes(values: Array, power: Array, xp: Namespace) -> tuple[Array, Array]:
    """Magnitudes of values, (G, N, E + 1), and the least sums that are clearly above the bound, (G, 1, 1, E + 1).

    Magnitudes are relative to the power of two above the channel, and have three bits of their own. So a sum of them
    does not depend on that power, but for values that count as 0. The last column has ones, for the weights alone.
    """
    sizes = xp.multiply(xp.abs(values), xp.divide(1.0, power))
    is_small = xp.less(sizes, LEAST_MAGNITUDE)
    num_small = xp.sum(xp.astype(xp.logical_and(is_small, xp.greater(sizes, 0.0)), xp.float64), axis=-2, keepdims=True)
    least = xp.multiply(num_small, FILTER * LEAST_CREDIT)
    carrier = xp.multiply(sizes, 2.0 ** (PRECISION - 3))
    carrier += sizes
    sizes = xp.where(is_small, 0.0, xp.subtract(carrier, xp.subtract(carrier, sizes)))
    sizes, least = (
        xp.concat([xp.astype(x, xp.float32), last], axis=-1)
        for x, last in ((sizes, _column(sizes, 1.0, xp)), (least, _column(least, 0.0, xp)))
    )
    return xp.multiply(sizes, 1 / WEIGHT_UNIT), xp.expand_dims(least, axis=-3)


def _column(x: Array, number: float, xp: Namespace) -> Array:
    """A number for each row."""
    *dims, _ = shape(x, xp=xp)
    return xp.full((*dims, 1), number, dtype=xp.float32, **on_device_of(x))


def float32_weights(scores: Array, weights: Array, xp: Namespace) -> Array:
    """The first slices of weights, or in a compiled program their numbers: XLA would take all powers once more."""
    if is_concrete(weights):
        return xp.astype(weights, xp.float32)
    exponentials = xp.exp(xp.multiply(xp.astype(scores, xp.float32), 1 / SCORE_UNIT))
    return xp.multiply(exponentials, WEIGHT_UNIT)


def block_margins(grid: Grid, weights: Array, block: ExactScoreBlock, bound: Any, magnitudes: Array) -> Array:
    r"""Sums :math:`\sum_j (w_{ij} - \tau) |v_{je}|` over a block of keys; in the last column, without the values.

    The weights are those of `float32_weights`, and ``bound`` is tau in their units where keys are allowed, and else 0.
    """
    xp, dropout = grid.xp, dropout_of(grid)
    excess = grid.loops.inplace(xp.subtract, weights, bound)
    if dropout is None:
        return matmul_per_group(excess, magnitudes, xp)
    kept = apply_dropout(excess, dropout, block.at, num_heads_of(grid), xp=xp)
    of_channels = matmul_per_group(kept, magnitudes[..., :-1], xp)
    of_weights = xp.multiply(xp.sum(excess, axis=-1, keepdims=True), 1 / WEIGHT_UNIT)
    return xp.concat([of_channels, of_weights], axis=-1)


def bound_of(grid: Grid, allowed: Array | None, i: Any, j: Any, like: Array) -> Any:
    """The third argument of `block_margins`."""
    if allowed is None:
        return FILTER * WEIGHT_UNIT
    xp = grid.xp
    compute = functools.partial(_times_filter, allowed, xp)
    return cached_by_distance(grid, "bound", i, j, like=like, compute=compute)


def _times_filter(allowed: Array, xp: Namespace) -> Array:
    return xp.multiply(xp.astype(allowed, xp.float32), FILTER * WEIGHT_UNIT)


def doubtful(margins: Array, least: Array, xp: Namespace) -> Array:
    """Which sums of `block_margins` are not clearly above the bound: below the least sums of `value_magnitudes`."""
    return xp.less(margins, least)
