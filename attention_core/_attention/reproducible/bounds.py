r"""What plain float64 and the reference are off by, as `docs/explanation/identical-bits.md` proves.

With :math:`u = 2^{-53}`, libraries are assumed to add up a product of K terms with an error of at most
:math:`(K + 1)\, u\, |A||B|`, in any order, with or without fused multiplication. Their exponentials and logarithms are
assumed to be off by at most `FUNCTION_ERROR`, relative to the result, and the exponential of 0 to be 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from ..._arithmetic.exact import slice_bits
from ..._arrays import Array, Namespace
from ...masks._mask import band_of
from ..blocks.grid import Grid

ULP = 2.0**-53  # u
FUNCTION_ERROR = 2.0**-50
SOFTCAP_ERROR = 2.0**-43  # of a softened score, in units of the softcap
LOGARITHM_ERROR = 2.0**-48  # of the reference's logarithm to base 2
WEIGHT_ERROR = 2.0**-46  # of a weight of the backward pass, next to those of its score and its logarithm
SLACK = 1.05  # for products of errors
MOST = 2.0**-8  # of each relative error of a weight: above, nothing is decided
SLICES = 3  # of each number in exact scores
TINY = 2.0**-200  # absolute, below all numbers of float32
SUBNORMAL = (
    2.0**-126 - 2.0**-150
)  # absolute, above `TINY` and what an average by weights that count subnormal values is off by
LEAST_SIZE = 2.0**-124  # that is added to sizes in float32
UNDERFLOW = 2.0**-60  # what sums of products of sizes lose below the least float32, by their `sum_error`
LOGARITHM_STEP = 2.0**-34  # what the logarithm of a sum of weights is rounded to


@functools.cache
def score_error(width: int) -> float:
    """The error of a product of two vectors of this width, and of its exact counterpart, by both norms.

    The latter leaves out products of slices below its third ones.
    """
    return (width + 16) * ULP + 8 * width * 2.0 ** (-SLICES * slice_bits(SLICES * width))


def sum_error(grid: Grid, side: int, num_ranks: int = 1) -> Any:
    """The relative error of sums over all queries or keys, and of their exact counterparts, by the sum of sizes.

    Blocks are summed one by one, rescaled, and then added. Exact sums drop 2**-59.5 of their largest term, of each. Of
    a narrow band, only so many terms are not 0, and only so many blocks are not empty.
    """
    size, count, length = grid.sizes[side], grid.counts[side], grid.lengths[side]
    band = band_of(grid.call.mask)
    if isinstance(length, int):
        length = min(length, max(1, band.high - band.low + 1))
        count = min(count, length // size + 2)
    if side == 0:
        size, length = size * grid.dims[2], length * grid.dims[2]
    total = (size + count * (2 + round(FUNCTION_ERROR / ULP)) + length // 64 + 41) * num_ranks
    return (total if isinstance(total, int) else grid.xp.astype(total, grid.xp.float64)) * ULP


def size_of(x: Array, xp: Namespace) -> Array:
    """Magnitudes in float32: more than those that float32 does not hold."""
    size = xp.astype(x, xp.float32)
    size += LEAST_SIZE
    return size


def limited(x: Array, error: Array, xp: Namespace) -> Array:
    """Numbers of rows, nan where the relative error of the weights of the row is not small."""
    return xp.where(xp.less(error, MOST), x, math.nan)


def decided(found: Array, bound: Array, rounded: Callable[[Array, Namespace], Array], xp: Namespace) -> Array:
    """What a number is rounded to, a monotone function of it; nan where the bound leaves that in doubt."""
    low, high = rounded(xp.subtract(found, bound), xp), rounded(xp.add(found, bound), xp)
    return xp.where(xp.equal(low, high), low, math.nan)


def round_logarithm(x: Array, xp: Namespace) -> Array:
    """Round to the nearest multiple of `LOGARITHM_STEP`; numbers above 2**19 have no finer digits."""
    return xp.multiply(xp.round(xp.multiply(x, 1 / LOGARITHM_STEP)), LOGARITHM_STEP)
