"""Two steps timed in turns, for scripts that print a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Step", "measured"]

TURNS = 15
Step: TypeAlias = Callable[[], Any]


def measured(ours: Step, other: Step, turns: int = TURNS) -> tuple[float, list[float]]:
    """The median time of our step in milliseconds, and the quartiles of its ratio to the other."""
    times: list[tuple[float, float]] = []
    for turn in range(turns + 2):
        pair = []
        for step in (ours, other) if turn % 2 else (other, ours):
            started = time.perf_counter()
            step()
            pair.append(time.perf_counter() - started)
        times.append((pair[0], pair[1]) if turn % 2 else (pair[1], pair[0]))
    ratios = [first / second for first, second in times[2:]]  # the first two are warm-up
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if turns > 1 else ratios * 3
    return 1e3 * statistics.median(first for first, _ in times[2:]), quartiles
