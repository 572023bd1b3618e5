"""Loops over blocks of queries, each with the keys of its sample."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from ..._arithmetic.exact import as_three_float32
from ..._arrays import Array, Arrays, Namespace, shape
from ..blocks.grid import Grid, Sample, pad
from ..blocks.visits import make_visits, visit_blocks


class QueryRows(NamedTuple):
    """A block of queries, next to all keys of its sample."""

    grid: Grid
    sample: Sample
    i: Any  # index of the block of queries

    def visit(self, absorb: Callable[[bool, Any, Any], Any], state: Any) -> Any:
        """Absorb the blocks of keys that these queries attend to."""
        return visit_blocks(self.grid, self.sample.index, self.i, absorb, state)

    def block_of(self, x: Array) -> Array:
        """The block of these queries, of an array (B, G, R, M, ...)."""
        return self.block(self.grid.part_of(x, self.sample.index, self.sample.head))

    def block(self, x: Array) -> Array:
        """The same of an array (G, R, M, ...) of this sample."""
        return self.grid.loops.block(x, self.i, self.grid.sizes[0], -2)


def for_each_rows(
    grid: Grid,
    prepare: Callable[[Sample], Any],
    compute: Callable[[QueryRows, Any], Arrays],
    accumulators: tuple[Any, ...],
) -> Arrays:
    """Arrays (B, G, R, M, ...) of what ``compute(rows, prepared)`` returns for each block of queries.

    ``prepared`` is what ``prepare(sample)`` returns, which is called once for all blocks of queries of a sample.
    """
    loops, grid = grid.loops, grid._replace(visits=make_visits(grid, by_key=False))

    def add_sample(index: Any, accumulators: Any) -> Any:
        sample = grid.sample_at(index)
        prepared = prepare(sample)

        def add_rows(i: Any, accumulators: Any) -> Any:
            row_blocks = itertools.repeat(index * grid.counts[0] + i, len(accumulators))
            return tuple(map(loops.add_block, accumulators, row_blocks, compute(QueryRows(grid, sample, i), prepared)))

        return loops.for_each(grid.counts[0], add_rows, accumulators, grid.work)

    return tuple(grid.concat_blocks(grid.for_each_sample(add_sample, accumulators), 0))


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
