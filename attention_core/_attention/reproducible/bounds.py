r"""What plain float64 and the reference are off by, and exact sums where that leaves a result undecided.

A filter (J. R. Shewchuk, 1997; A. Ziv, 1991) computes a result with a bound of its error, which
`docs/explanation/identical-bits.md` proves. Where both ends of the bound round to one number, that is the result.
Elsewhere, about once in a thousand, `settle` computes the sums that define it.

With :math:`u = 2^{-53}`, libraries are assumed to add up a product of K terms with an error of at most
:math:`(K + 1)\, u\, |A||B|`, in any order, with or without fused multiplication. Their exponentials and logarithms are
assumed to be off by at most `FUNCTION_ERROR`, relative to the result, and the exponential of 0 to be 1.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..._arithmetic.exact import round_to_float32, slice_bits, to_float64, uncontracted
from ..._arithmetic.products import exact_sum
from ..._arrays import Array, Arrays, Namespace, shape, take_rows, zeros_with
from ..._backend import Ranks, is_concrete
from ...masks._mask import band_of
from ..blocks.grid import Grid
from ..blocks.plan import pad

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
    """Magnitudes in float32, plus `LEAST_SIZE`: not below the true ones, even if those are too small for float32."""
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


AT_ONCE = 2**18  # products that are summed at a time
TERM_BITS = 30  # of the two integers of a term: sums of up to 2**23 of them are exact
LONG = 2**10  # terms of a sum in all heads: above, heads are taken one by one
MOST_AT_ONCE = 96  # rows, or sums, that are computed at a time


class Terms(NamedTuple):
    r"""Sums :math:`u_{l} \sum_n a_{ln} b_{nc}`, rows l of each of G groups, of which only some are computed."""

    factors: Array  # a, (G, L, N)
    columns: Array  # b, (G, N, C), of at most 32 bits
    units: Array  # u, (G, L, 1)


Reference = Callable[[Array], tuple[list[Terms], list[Array]]]
"""Of the indices of some rows: terms, whose sums are (G, R K, C) or (G, K, C), and results (..., K, C) as they are."""


def settle(
    grid: Grid,
    side: int,
    found: Sequence[Array],
    reference: Callable[[Any], Reference],
    ranks: Ranks | None = None,
) -> list[Array]:
    """Sums in float32, and then results of rows in float64, with exact ones where they are nan: not decided.

    They are (B, G, R, M, C) on the side of queries, (B, G, N, C) on that of keys. Sums are those of all ranks, if there
    are others, which have the same doubts.
    """
    xp, loops, dims = grid.xp, grid.loops, (*grid.dims[:2], *grid.lengths)
    between = (grid.dims[2],) if side == 0 else ()
    nans = [xp.any(xp.isnan(x), axis=-1) for x in found]
    flagged = functools.reduce(xp.logical_or, [xp.any(x, axis=2) if between else x for x in nans])  # (B, G, L)
    if not loops.traced and not _count(flagged, xp):
        return list(found)
    if {*map(type, dims)} == {int} and grid.dims[1] * grid.lengths[1 - side] > LONG:
        grid = grid._replace(plan=grid.plan._replace(per_head=True), num_rounds=grid.dims[0] * grid.dims[1])
    num_heads = 1 if grid.plan.per_head else grid.dims[1]
    length, across = grid.lengths[side], grid.lengths[1 - side]
    most, rounds = _most(across, num_heads, grid.dims[2]), (grid.num_rounds, num_heads)
    parts = [xp.reshape(x, (*rounds, *between, length, shape(x, xp=xp)[-1])) for x in found]
    flagged = xp.any(xp.reshape(flagged, (*rounds, length)), axis=1)

    def add_sample(index: Any, stacks: Any) -> Any:
        of_sample, flags = [loops.block_at(x, index) for x in parts], loops.block_at(flagged, index)
        if loops.traced or _count(flags, xp):
            exact_rows = reference(grid.sample_at(index))

            def compute(rows: Array) -> Arrays:
                terms, exact = exact_rows(rows)
                doubts = (xp.isnan(take_rows(x, rows, axis=-2, xp=xp)) for x in of_sample)
                sums = (_sum_where(grid, *pair, across, ranks) for pair in zip(terms, doubts, strict=False))
                return (*(round_to_float32(x, xp) for x in sums), *exact)

            of_sample = _fill(grid, of_sample, flags, most, compute)
        return tuple(map(loops.add_block, stacks, itertools.repeat(index), of_sample))

    stacks = tuple([_stack(grid, grid.num_rounds, x, *shape(x, xp=xp)[1:]) for x in parts])
    stacks = loops.loop(0, grid.num_rounds, add_sample, stacks)
    return [xp.reshape(loops.stack_blocks(x), shape(like, xp=xp)) for x, like in zip(stacks, found, strict=True)]


def _most(length: Any, *counts: Any) -> int:
    """How many rows of so many products, in each of several heads, are computed at a time."""
    if not all(isinstance(x, int) for x in (length, *counts)):
        return MOST_AT_ONCE
    return max(1, min(MOST_AT_ONCE, AT_ONCE // max(1, int(math.prod((length, *counts))))))


def _sum_where(grid: Grid, terms: Terms, doubt: Array, length: Any, ranks: Ranks | None) -> Array:
    """The sums that are in doubt, in the shape of the doubts."""
    xp, (factors, columns, units) = grid.xp, terms
    (num_groups, num_rows, num_terms), width = shape(factors, xp=xp), shape(columns, xp=xp)[-1]
    factors = xp.reshape(factors, (num_groups * num_rows, num_terms))
    columns = xp.reshape(xp.permute_dims(columns, (1, 0, 2)), (num_terms, num_groups * width))
    units = xp.reshape(units, (num_groups * num_rows, 1))
    known = xp.add(xp.sum(factors, axis=-1, keepdims=True), units)
    known = xp.isnan(known if ranks is None else ranks.total(known))  # as nan: no sum is needed

    def add_up(at: Array) -> Arrays:
        row = xp.floor_divide(at, width)
        column = xp.add(xp.multiply(xp.floor_divide(row, num_rows), width), xp.remainder(at, width))
        factor = take_rows(factors, row, axis=0, xp=xp)
        of_column = xp.matrix_transpose(take_rows(columns, column, axis=1, xp=xp))
        products = xp.multiply(factor, to_float64(of_column, xp))
        products = xp.where(xp.equal(factor, 0.0), 0.0, uncontracted(products, xp))  # not nan
        total = exact_sum(products, -1, bits=TERM_BITS, ranks=ranks, xp=xp)
        return (uncontracted(xp.multiply(total, take_rows(units, row, axis=0, xp=xp)), xp),)

    flags = xp.logical_and(xp.reshape(doubt, (num_groups * num_rows, width)), xp.logical_not(known))
    flags = xp.reshape(flags, (num_groups * num_rows * width, 1))
    undecided = xp.where(flags, xp.full_like(flags, math.nan, dtype=xp.float64), 0.0)
    (sums,) = _fill(grid, [undecided], flags[:, 0], _most(length), add_up)
    sums = xp.where(known, math.nan, xp.reshape(sums, (num_groups * num_rows, width)))
    return xp.reshape(sums, shape(doubt, xp=xp))


def _fill(grid: Grid, arrays: list[Array], flags: Array, most: int, compute: Callable[[Array], Arrays]) -> list[Array]:
    """Arrays (..., n, C) with rows of ``compute(indices)`` where they are nan: for a few true flags (n) at a time.

    Compiled loops take lots of one size, whose last may hold rows in vain.
    """
    xp, loops, (length,) = grid.xp, grid.loops, shape(flags, xp=grid.xp)
    count: Any = xp.sum(xp.astype(flags, xp.int32), dtype=xp.int32) if loops.traced else _count(flags, xp)
    if any(isinstance(each, int) and each == 0 for each in (length, count)):
        return arrays
    order = xp.astype(xp.argsort(xp.astype(xp.logical_not(flags), xp.int32), stable=True), xp.int32)
    inverse = xp.astype(xp.argsort(order, stable=True), xp.int32)
    if loops.traced:
        size = min(most, length) if isinstance(length, int) else most
        num_lots = (length + (size - 1)) // size if isinstance(length, int) else length // size + 1  # at least one
        order = xp.squeeze(pad(xp.expand_dims(order, axis=-1), -2, num_lots * size - length, xp, 0), axis=-1)
    else:
        size, order = min(most, count), order[:count]
        num_lots = -(-count // size)
        inverse = xp.where(xp.less(inverse, count), inverse, 0)

    def add_lot(t: Any, stacks: Any) -> Any:
        rows = xp.squeeze(loops.block(xp.expand_dims(order, axis=-1), t, size, -2), axis=-1)
        return tuple(map(loops.add_block, stacks, itertools.repeat(t), compute(rows)))

    dims = (shape(x, xp=xp) for x in arrays)
    stacks = tuple([_stack(grid, num_lots, x, *dim[:-2], size, dim[-1]) for x, dim in zip(arrays, dims, strict=True)])
    stacks = loops.loop(0, (count + (size - 1)) // size, add_lot, stacks)
    sorted_rows = (loops.block_at(loops.stack_blocks(loops.concat_blocks(x, num_lots, -2)), 0) for x in stacks)
    exact = (take_rows(x, inverse, axis=-2, xp=xp) for x in sorted_rows)
    return [xp.where(xp.isnan(x), y, x) for x, y in zip(arrays, exact, strict=True)]


def _count(flags: Array, xp: Namespace) -> int:
    """How many flags are true, which a lazy library computes now; 0 of arrays without values, as those of meta."""
    count = xp.sum(xp.astype(flags, xp.int32), dtype=xp.int32)
    try:
        return int(count)
    except RuntimeError:
        if is_concrete(count):
            raise
        return 0


def _stack(grid: Grid, count: Any, like: Array, *dims: Any) -> Any:
    return grid.loops.zero_blocks(count, lambda _: zeros_with(like, *dims, xp=grid.xp))
