"""NaN and infinities in blocks: attended ones show, masked ones do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attention_core._arrays import Array, Namespace
from attention_core._attention.blocks.grid import Grid


def with_nonfinite_values(
    tiles: Grid,
    average: Callable[[Callable[[Array], Array]], tuple[Array, ...]],
    empty: Callable[[], tuple[Array, ...]],
) -> tuple[Array, ...]:
    """The results of ``average(part)``, which averages a part of the values: of all, whether finite or not.

    What is not finite and attended shows, whatever its weight: inf and nan pull upwards, -inf and nan downwards. That
    takes two more sweeps, in which the values tell where such are; a loop holds the sweeps, as it is traced once.
    """
    if tiles.plan.all_finite:
        return average(lambda values: values)
    xp = tiles.xp
    infinite = xp.logical_not(xp.all(xp.isfinite(tiles.operands.value)))
    sweeps = xp.add(xp.multiply(xp.astype(infinite, xp.int32), 2), 1)

    def sweep(number: Any, results: tuple[Array, ...]) -> tuple[Array, ...]:
        pull = _signed_infinity(3 - 2 * number, results[0], xp)  # sweep 1 looks for inf, sweep 2 for -inf

        def part(values: Array) -> Array:
            pulling = xp.astype(xp.logical_or(xp.isnan(values), xp.equal(values, pull)), values.dtype)
            return _select_pass(number, finite_or_zero(tiles, values), pulling, xp)

        output, *rest = average(part)
        found = xp.greater(output, 0.0)
        torn = xp.logical_and(found, xp.equal(results[0], -pull))  # inf - inf is nan, about which NumPy would warn
        before = xp.where(torn, math.nan, results[0])
        return _select_pass(number, output, xp.add(before, xp.where(found, pull, xp.zeros_like(output))), xp), *rest

    return tiles.loops.loop(0, sweeps, sweep, empty())  # type: ignore[no-any-return]


def _select_pass(number: Any, first: Array, other: Array, xp: Namespace) -> Array:
    """One array for the number 0, and another for those after it."""
    if isinstance(number, int):
        return other if number else first
    return xp.where(xp.equal(number, 0), first, other)


def _signed_infinity(sign: Any, like: Array, xp: Namespace) -> Any:
    return sign * math.inf if isinstance(sign, int) else xp.multiply(xp.astype(sign, like.dtype), math.inf)


def nan_unless_finite(tiles: Grid, x: Array) -> Array:
    """A block of queries or keys for the scores: a vector that is not finite gives nan wherever it is attended."""
    if tiles.plan.all_finite:
        return x
    xp = tiles.xp
    return xp.where(xp.all(xp.isfinite(x), axis=-1, keepdims=True), x, math.nan)


def finite_or_zero(tiles: Grid, x: Array) -> Array:
    """The finite elements of a block, by which others are multiplied."""
    return x if tiles.plan.all_finite else tiles.xp.where(tiles.xp.isfinite(x), x, 0.0)
