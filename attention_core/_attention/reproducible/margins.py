r"""A cheap test of which queries may need more slices than the two of every weight.

Two slices of a weight are off by up to :math:`2^{-36.6}` of the largest weight of the row, however small it is itself.
So a sum of weighted values is accurate where :math:`\sum_j w_{ij} |v_{je}|` is at least :math:`\tau = 2^{-7}` times
:math:`\sum_j |v_{je}|`, over the keys that the query may attend to. `refinement` decides that by exact sums.

Here, sums of :math:`(w_{ij} - \tau) |v_{je}|` in float32 tell which queries are clearly above the bound, as nearly all
are. Their rounding depends on the library, without any effect: :math:`\tau` is larger by a sixteenth here, so a query
in doubt only costs time.
"""

from __future__ import annotations

import functools
from typing import Any

from attention_core._arrays import Array, Namespace, on_device_of, shape
from attention_core._attention.blocks.grid import Grid, cached_by_distance, dropout_of, num_heads_of
from attention_core._attention.blocks.scores import matmul_per_group
from attention_core._attention.call import apply_dropout
from attention_core._attention.reproducible.block import ExactScoreBlock
from attention_core._attention.reproducible.slices import SCORE_UNIT, VALUE_BITS, WEIGHT_BITS
from attention_core._backend import is_concrete

LOG_TAU = -7
FILTER = 2.0**LOG_TAU * 17 / 16
WEIGHT_UNIT = 2.0 ** WEIGHT_BITS[2]
COARSE_BITS = 12  # bits of a magnitude in exact comparisons, of which 2**19 can be added
CREDIT = 65  # added to each magnitude that is not 0, in the unit of the last of these bits: covers what is left out
PENALTY = 4  # in that unit, for a weight of 1
STEP = 2.0 ** (VALUE_BITS[2] - COARSE_BITS)  # that unit, in those of a first slice of a value


def first_magnitudes(slices: Array, xp: Namespace) -> tuple[Array, Array]:
    """Magnitudes of values, (G, N, E + 1), and the factors of their bounds, (G, 1, 1, E + 1).

    Magnitudes are those of the first of two slices (G, N, 2 E). A channel of zeros has the factor 0: it is never in
    doubt. The last column has ones, for the weights alone.
    """
    *dims, width = shape(slices, xp=xp)
    sizes = xp.abs(xp.astype(slices[..., width // 2 :], xp.float32))
    used = xp.astype(xp.greater(xp.max(sizes, axis=-2, keepdims=True), 0.0), xp.float32)
    ones = xp.ones((*dims, 1), dtype=xp.float32, **on_device_of(slices))
    factors = xp.concat([used, xp.multiply(ones[..., :1, :], 2.0 ** (1 - VALUE_BITS[2]))], axis=-1)
    return xp.multiply(xp.concat([sizes, ones], axis=-1), 1 / WEIGHT_UNIT), xp.expand_dims(factors, axis=-3)


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


def doubtful(margins: Array, weight: Array, factors: Array, xp: Namespace) -> Array:
    """Which sums of `block_margins` are not clearly above the bound, by the sums of weights (G, R, m, 1) of their rows.

    The difference of both sums of weights is tau times the number of keys that a row may attend to.
    """
    of_weights = xp.multiply(xp.astype(weight, xp.float32), (CREDIT + 1.5 * PENALTY) * STEP)
    least = xp.subtract(of_weights, xp.multiply(margins[..., -1:], CREDIT * STEP))
    return xp.less(margins, xp.multiply(least, factors))
