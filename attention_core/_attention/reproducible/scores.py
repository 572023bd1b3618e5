"""Scores in float64: the exact ones that define all bits, and those of plain products that come near them."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

from ..._arithmetic.elementary import tanh
from ..._arithmetic.exact import LOG2_E, power_above_max, slice_bits, slices, to_float64, uncontracted
from ..._arrays import Array, Namespace, take_rows
from ..._backend import Loops, runs_at_once
from ...masks import Positions
from ..blocks.grid import Grid, Sample, is_broadcast, matmul_per_group
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

    Where a vector is not finite, its slices are nan, as its power is. Where a library computes at once, a last slice of
    zeros is left out: few numbers of 24 bits reach into it.
    """
    bits, power = slice_bits(SLICES * x.shape[-1]), power_above_max(x, -1, xp)
    parts = slices(x, power, bits=bits, count=SLICES, xp=xp)
    if runs_at_once(x) and not bool(xp.any(parts[-1])):
        parts.pop()
    for n in range(len(parts)):
        parts[n] *= xp.multiply(power, 2.0 ** (-bits * (n + 1)))
    return parts


def exact_product(queries: list[Array], keys: list[Array], xp: Namespace) -> Array:
    """Products of slices of queries (G, R, m, D) and keys (G, n, D): (G, R, m, n), the same bits in any order.

    The sum of all products of slices whose bits are as small is exact. These sums are added, the smallest first.
    """
    levels: list[Array | None] = [None] * SLICES
    for (a, query), (b, key) in itertools.product(enumerate(queries), enumerate(keys)):
        if a + b < SLICES:
            product, before = matmul_per_group(query, xp.matrix_transpose(key), xp), levels[a + b]
            levels[a + b] = product if before is None else xp.add(before, product)
    return functools.reduce(lambda small, large: xp.add(large, small), (x for x in reversed(levels) if x is not None))


def exact_block(
    grid: Grid, sample: Sample, queries: list[Array], keys: list[Array], *, i: Any, j: Any, masked: bool
) -> tuple[Array, ScoreBlock]:
    """Exact scores of slices of queries and keys, in units of log 2, and their block."""
    xp = grid.xp
    product = uncontracted(xp.multiply(exact_product(queries, keys, xp), grid.plan.score_scale), xp)
    block = score_block(grid, sample, product, i=i, j=j, masked=masked)
    scores = uncontracted(xp.multiply(block.scores, LOG2_E), xp)
    return (xp.where(xp.equal(block.scores, -math.inf), -math.inf, scores) if masked else scores), block


class ListedRows(NamedTuple):
    """Some queries against all keys, or all queries against some keys, of one sample: a grid of one block."""

    grid: Grid
    sample: Sample

    def scores(self, queries: list[Array], keys: list[Array]) -> tuple[Array, ScoreBlock]:
        """Exact scores of slices of queries and keys, in units of log 2, and their block."""
        return exact_block(self.grid, self.sample, queries, keys, i=0, j=0, masked=self.grid.may_mask)


def listed_rows(grid: Grid, sample: Sample, side: int, rows: Array) -> ListedRows:
    """The block of the queries (side 0) or keys (side 1) at these indices, and of all keys or queries."""
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
    return ListedRows(of_rows, sample._replace(bias=bias, at=at, **taken))


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
    return uncontracted(grid.xp.multiply(to_float64(query, grid.xp), grid.plan.score_scale), grid.xp)
