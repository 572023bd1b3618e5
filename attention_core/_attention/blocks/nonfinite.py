"""NaN and infinities in passes over blocks: attended ones show, masked ones do not."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from attention_core._arrays import Array, Arrays, Namespace, is_on_host
from attention_core._attention.blocks.grid import Grid
from attention_core._attention.finite import value_columns, with_infinities


def with_nonfinite_values(
    grid: Grid,
    average: Callable[[Grid, Callable[[Array], Array]], Arrays],
    empty: Callable[[], Arrays],
) -> Arrays:
    """The results of ``average(grid, part)``, which averages a part of the values, for values that may not be finite.

    A non-finite value that is attended to appears in the output, whatever its weight. Two more passes find out where:
    they average indicators, one of inf or NaN, one of -inf or NaN. A loop holds all passes, as it is traced once. An
    accelerator is not asked whether there is any: it averages values and indicators in one pass.
    """
    if grid.plan.all_finite:
        return average(grid, lambda values: values)
    xp = grid.xp
    if not grid.loops.traced and not is_on_host(grid.operands.value):
        return with_value_columns(grid, average)
    infinite = xp.logical_not(xp.all(xp.isfinite(grid.operands.value)))
    num_passes = xp.add(xp.multiply(xp.astype(infinite, xp.int32), 2), 1)
    one_pass = functools.partial(_one_pass, grid, average)
    return grid.loops.loop(0, num_passes, one_pass, empty())  # type: ignore[no-any-return]


def with_value_columns(grid: Grid, average: Any) -> Arrays:
    """The same in one pass over finite values and both indicators, side by side."""
    columns = grid.operands._replace(value=value_columns(grid.operands.value, grid.xp))
    averages, *rest = average(grid._replace(operands=columns), lambda values: values)
    return with_infinities(averages, grid.xp), *rest


def _one_pass(grid: Grid, average: Any, number: Any, results: Arrays) -> Arrays:
    """Pass 0 averages finite values; pass 1 adds attended inf to the output, and pass 2 attended -inf."""
    xp = grid.xp
    infinity = _signed_infinity(3 - 2 * number, results[0], xp)
    output, *rest = average(grid, functools.partial(_values_or_indicators, grid, number, infinity))
    attended = xp.greater(output, 0.0)
    both = xp.logical_and(attended, xp.equal(results[0], -infinity))  # inf - inf, of which NumPy would warn
    before = xp.where(both, math.nan, results[0])
    after = xp.add(before, xp.where(attended, infinity, xp.zeros_like(output)))
    return _select_pass(number, output, after, xp), *rest


def _values_or_indicators(grid: Grid, number: Any, infinity: Any, values: Array) -> Array:
    xp = grid.xp
    infinity = infinity if isinstance(infinity, float) else xp.astype(infinity, values.dtype)
    indicators = xp.astype(xp.logical_or(xp.isnan(values), xp.equal(values, infinity)), values.dtype)
    return _select_pass(number, finite_or_zero(grid, values), indicators, xp)


def _select_pass(number: Any, first: Array, other: Array, xp: Namespace) -> Array:
    """One array for pass 0, and another for those after it."""
    if isinstance(number, int):
        return other if number else first
    return xp.where(xp.equal(number, 0), first, other)


def _signed_infinity(sign: Any, like: Array, xp: Namespace) -> Any:
    """An infinity of a sign that may be known only when a program runs."""
    return sign * math.inf if isinstance(sign, int) else xp.multiply(xp.astype(sign, like.dtype), math.inf)


def finite_or_zero(grid: Grid, x: Array) -> Array:
    """A block with 0 for what is not finite, to multiply others by."""
    return x if grid.plan.all_finite else grid.xp.where(grid.xp.isfinite(x), x, 0.0)


def zero_unless_finite(gradient: Array, x: Array, xp: Namespace) -> Array:
    """The gradient of an array whose non-finite elements were replaced by constants: 0 for those."""
    return xp.where(xp.isfinite(x), gradient, 0.0)
