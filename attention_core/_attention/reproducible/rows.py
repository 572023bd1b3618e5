"""Rows in float64: their padding, and the logarithms of their sums of weights."""

from __future__ import annotations

from ..._arithmetic.exact import as_three_float32
from ..._arrays import Array, Namespace, shape
from ..blocks.grid import Grid, pad


def pad_rows(grid: Grid, rows: Array) -> Array:
    """Rows with zeros at the end, like the queries where all blocks have one size."""
    if not grid.loops.traced:
        return rows
    return pad(rows, -2, shape(grid.call.query, xp=grid.xp)[-2] - grid.lengths[0], grid.xp)


LOGARITHM_UNIT = 2.0**10  # so that even the scores of a bias of the lowest float32 fit into float32


def pack_logarithm(logarithm: Array, xp: Namespace) -> Array:
    r"""The integer :math:`a_i` and :math:`r_i = \log_2 \sum_j w_{ij}`, (..., 2), as three float32 numbers each.

    Gradients and weights are of the softmax :math:`p_{ij} = 2^{t_{ij} - a_i - r_i}`.
    """
    return xp.concat(as_three_float32(xp.multiply(logarithm, 1 / LOGARITHM_UNIT), xp), axis=-1)


def unpack_logarithm(parts: Array, xp: Namespace) -> tuple[Array, Array]:
    """The numbers of `pack_logarithm`, (..., 1) each, out of float64."""
    first, second, third = (parts[..., n : n + 2] for n in (0, 2, 4))
    logarithm = xp.multiply(xp.add(first, xp.add(second, third)), LOGARITHM_UNIT)
    return logarithm[..., :1], logarithm[..., 1:]
