"""Scores in float64: the exact ones that define all bits, and those near them; and loops over blocks of queries."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from ..._arithmetic.elementary import tanh
from ..._arithmetic.exact import LOG2_E, as_three_float32, power_above_max, slice_bits, slices, to_float64, uncontracted
from ..._arrays import Array, Namespace, shape, take_rows
from ..._backend import Loops, runs_at_once
from ...masks import Positions
from ..blocks.grid import Grid, Sample, is_broadcast, matmul_per_group
from ..blocks.plan import pad
from ..blocks.visits import block_context
from .bounds import MOST, SLICES, score_error


class ScoreBlock(NamedTuple):
    """A block of queries against a block of keys."""

    scores: Array  # (G, R, m, n); -inf where not allowed
    softcap_derivative: Array | None
    bias: Array | None  # in float64
    at: Positions | None


def score_block(grid: Grid, sample: Sample, product: Array, *, i: Any, j: Any, masked: bool) -> ScoreBlock:
    """The scores of a product of scaled queries and keys: softcap, bias and mask.

    Masked scores are replaced by -inf; a bias that is -inf masks, too. There is no score modification in reproducible
    arithmetic.
    """
    softcap, xp, scores, derivative = grid.call.softcap, grid.xp, product, None
    at, bias, allowed = block_context(grid, sample, scores, i, j=j, masked=masked)
    if softcap is not None:
        scores, derivative = _soften(scores, softcap, xp)
    if bias is not None:
        bias = to_float64(bias, xp)
        scores = xp.add(scores, bias)
    scores = grid.weighed(scores, xp.zeros_like)
    scores = scores if allowed is None else xp.where(allowed, scores, -math.inf)
    if derivative is not None and grid.may_mask:  # that of a masked key may be nan
        derivative = xp.where(xp.equal(scores, -math.inf), 0.0, derivative)
    return ScoreBlock(scores, derivative, bias, at)


def _soften(scores: Array, softcap: float, xp: Namespace) -> tuple[Array, Array]:
    r"""Scores after the cap, :math:`c \tanh(s / c)`, and their derivative by s."""
    ratio = tanh(uncontracted(xp.multiply(scores, 1 / softcap), xp), xp)
    derivative = xp.subtract(1.0, uncontracted(xp.multiply(ratio, ratio), xp))
    return uncontracted(xp.multiply(ratio, softcap), xp), derivative


# Exact products


def cut_vectors(x: Array, xp: Namespace) -> list[Array]:
    r"""Vectors (..., D) as sums of slices, each of integers times a power of two of the vector.

    Where a vector is not finite, its slices are nan, as its power is. Where a library computes at once, slices of zeros
    at the end are left out: few numbers of 24 bits reach into the third.
    """
    bits, power = slice_bits(SLICES * x.shape[-1]), power_above_max(x, -1, xp)
    parts = slices(x, power, bits=bits, count=SLICES, may_end=True, xp=xp)
    for n in range(len(parts)):
        parts[n] *= xp.multiply(power, 2.0 ** (-bits * (n + 1)))
    return parts


def exact_product(queries: list[Array], keys: list[Array], xp: Namespace) -> Array:
    """Products of slices of queries (G, R, m, D) and keys (G, n, D): (G, R, m, n), the same bits in any order.

    The sum of all products of slices whose bits are as small is exact. These sums are added, the smallest first.
    """
    group_size = shape(queries[0], xp=xp)[1]
    levels: list[list[Array]] = [[] for _ in range(SLICES)]
    for b, key in enumerate(keys):
        factors = queries[: SLICES - b]
        products = matmul_per_group(xp.concat(factors, axis=1), xp.matrix_transpose(key), xp)
        for a in range(len(factors)):
            levels[a + b].append(products[:, a * group_size : (a + 1) * group_size, ...])
    sums = (functools.reduce(xp.add, level) for level in levels if level)
    return functools.reduce(lambda small, large: xp.add(large, small), reversed(list(sums)))


def exact_block(
    grid: Grid, sample: Sample, queries: list[Array], keys: list[Array], *, i: Any = 0, j: Any = 0, masked: bool
) -> tuple[Array, ScoreBlock]:
    """Exact scores of slices of queries and keys, in units of log 2, and their block: by default, the first one."""
    xp = grid.xp
    product = uncontracted(xp.multiply(exact_product(queries, keys, xp), grid.call.scale), xp)
    block = score_block(grid, sample, product, i=i, j=j, masked=masked)
    scores = uncontracted(xp.multiply(block.scores, LOG2_E), xp)
    return (xp.where(xp.equal(block.scores, -math.inf), -math.inf, scores) if masked else scores), block


def listed_rows(grid: Grid, sample: Sample, side: int, rows: Array) -> tuple[Grid, Sample]:
    """The queries (side 0) or keys (side 1) at these indices, and all keys or queries: a grid of one block."""
    xp, num_rows = grid.xp, rows.shape[0]
    whole = [count * size for count, size in zip(grid.counts, grid.sizes, strict=True)]
    sizes, lengths = whole if grid.loops.traced else list(grid.lengths), list(grid.lengths)
    sizes[side] = lengths[side] = num_rows
    bias, at, (name, axis) = sample.bias, sample.at, (("query", -2), ("key", -1))[side]
    if bias is not None and not is_broadcast(bias, axis):
        bias = take_rows(bias, rows, axis=axis, xp=xp)
    if at is not None:
        at = at._replace(**{name: take_rows(getattr(at, name), rows, axis=axis, xp=xp)})
    taken = {"query": sample.query} if side == 0 else {"key": sample.key, "value": sample.value}
    taken = {name: take_rows(x, rows, axis=-2, xp=xp) for name, x in taken.items()}
    of_rows = grid._replace(
        sizes=tuple(sizes),
        counts=(1, 1),
        lengths=tuple(lengths),
        cache=None,
        visits=None,
    )
    return of_rows, sample._replace(bias=bias, at=at, **taken)


# Products that come near


def near_vectors(x: Array, loops: Loops) -> tuple[Array, Array]:
    """Vectors in float64, nan where they are too long or not finite, and their norms (..., 1), 0 for these.

    The error of a score of vectors that are not too long is below `MOST`.
    """
    xp, norm = loops.xp, loops.xp.expand_dims(loops.norm(x), axis=-1)
    is_short = xp.less(norm, math.sqrt(MOST / score_error(x.shape[-1])))
    if runs_at_once(x) and bool(xp.all(is_short)):
        return x, norm
    return xp.where(is_short, x, math.nan), xp.where(is_short, norm, 0.0)


def scaled_queries(grid: Grid, query: Array) -> Array:
    """Queries in float64, times the scale: one product, rounded once."""
    return uncontracted(grid.xp.multiply(to_float64(query, grid.xp), grid.call.scale), grid.xp)


def pad_rows(grid: Grid, rows: Array) -> Array:
    """Rows with zeros at the end, like the queries where all blocks have one size."""
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
