"""NaN and infinities in passes over blocks: attended ones show, masked ones do not."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from ..._arrays import Array, Arrays, Namespace, shape
from ..._backend import can_be_read
from ..finite import average_of_columns, repaired_unless_clean, value_columns
from .grid import Grid


def with_nonfinite_values(grid: Grid, average: Callable[[Grid], Arrays], empty: Callable[[], Arrays]) -> Arrays:
    """The results of ``average(grid)``, which averages the values of a grid, for values that may not be finite.

    A non-finite value that is attended to appears in the output, whatever its weight. A host runs, looks at the result,
    and repairs it. A traced loop adds two passes where there is such a value: they average indicators, one of inf or
    NaN, one of -inf or NaN. It holds all passes, as it is traced once. An accelerator is not asked.
    """
    xp, loops = grid.xp, grid.loops
    if loops.traced:
        infinite = xp.astype(xp.logical_not(xp.isfinite(xp.sum(grid.call.value))), xp.int32)
        infinite = infinite if grid.ranks is None else grid.ranks.largest(infinite)
        num_passes = xp.add(xp.multiply(infinite, 2), 1)
        return loops.loop(0, num_passes, functools.partial(_one_pass, grid, average), empty())  # type: ignore[no-any-return]
    repair = functools.partial(_of_columns, grid, average)
    if not can_be_read(grid.call.value):
        return repair()
    grid = grid._replace(plan=grid.plan._replace(all_finite=True))
    if grid.call.arithmetic == "reproducible":  # where a row is nan only if it attends to a nan
        finite = xp.isfinite(grid.call.value)
        if grid.ranks is None and bool(xp.all(finite)):  # ranks look at results, which are those of all
            return average(grid)
        key = xp.where(xp.all(finite, axis=-1, keepdims=True), grid.call.key, math.nan)
        grid = grid._replace(call=grid.call._replace(key=key, value=xp.where(finite, grid.call.value, 0.0)))
    results = average(grid)
    return repaired_unless_clean(results, repair, loops)  # type: ignore[no-any-return]


def _of_columns(grid: Grid, average: Any) -> Arrays:
    """The results by one pass over finite values and both indicators, side by side."""
    columns = value_columns(grid.call.value, xp=grid.xp)
    grid = grid._replace(call=grid.call._replace(value=columns), width=shape(columns, xp=grid.xp)[-1])
    averages, *rest = average(grid)
    return average_of_columns(averages, grid.xp), *rest


def _one_pass(grid: Grid, average: Any, number: Any, results: Arrays) -> Arrays:
    """Pass 0 averages finite values; pass 1 adds attended inf to the output, and pass 2 attended -inf."""
    xp, before = grid.xp, results[0]
    is_first, infinity = xp.equal(number, 0), xp.multiply(xp.astype(3 - 2 * number, before.dtype), math.inf)

    def part_of(block: Array) -> Array:
        is_indicated = xp.logical_or(xp.isnan(block), xp.equal(block, xp.astype(infinity, block.dtype)))
        return xp.where(is_first, grid.finite_or_zero(block), xp.astype(is_indicated, block.dtype))

    found, *rest = average(grid._replace(value_part=part_of))
    attended = xp.greater(found, 0.0)
    both = xp.logical_and(attended, xp.equal(before, xp.negative(infinity)))
    after = xp.where(both, math.nan, xp.add(before, xp.where(attended, infinity, xp.zeros_like(found))))
    return xp.where(is_first, found, after), *rest  # nan of one sign, where a processor gives inf - inf another


def zero_unless_finite(gradient: Array, x: Array, xp: Namespace) -> Array:
    """The gradient of an array whose non-finite elements were replaced by constants: 0 for those."""
    return xp.where(xp.isfinite(x), gradient, 0.0)
