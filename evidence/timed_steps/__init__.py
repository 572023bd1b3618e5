"""Whole steps of a program, timed in turns with the same steps by a library's own functions.

A step is one that users take: of decoding with a cache, of a model. ``python -m timed_steps OPERATION LIBRARY`` prints
a row for each pair: our time, the ratio as the median over the turns with its quartiles, and memory.
"""

from __future__ import annotations

import fnmatch
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

TURNS = 15
Step: TypeAlias = Callable[[], Any]


class Pair(NamedTuple):
    """Two functions that do the same.

    Attributes
    ----------
    ours, other : callable
        Which wait for what they compute.
    num_steps : int
        In a call.
    """

    name: str
    ours: Step
    other: Step
    num_steps: int = 1


class Order(NamedTuple):
    """The pairs to time: of a library, whose names fit a pattern, and of a model in a GGUF file."""

    library: str
    pattern: str = "*"
    model: Path | None = None

    def takes(self, name: str) -> bool:
        """Whether a pair of this name is asked for."""
        return fnmatch.fnmatchcase(name, self.pattern)


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
