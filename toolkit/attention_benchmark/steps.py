"""Whole steps of a program, timed in turns with the same steps by a library's own functions.

A step is one that users take: of training, of decoding with a cache, of a model. Two take turns in a process of their
library. The ratio is the median over the turns, as everywhere in the benchmark, and stands with its quartiles.
"""

from __future__ import annotations

import fnmatch
import pkgutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import attention_workers as workers
from attention_benchmark.report import TextTable
from attention_workers.memory import peak_growth

TURNS = 15
Step: TypeAlias = Callable[[], Any]

OPERATIONS = {
    "decode-loop": ("decoding_loop", ("numpy", "torch", "jax")),
    "train-step": ("training_step", ("torch", "tensorflow")),
    "encoder": ("transformers_encoder", ("torch",)),
    "language-model": ("language_model", ("torch", "jax", "tensorflow", "numpy")),
}
"""The module that makes the pairs of an operation, and the libraries that have some."""


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


@dataclass(frozen=True)
class StepsOrder(workers.Order):
    """The pairs to time in one process.

    Attributes
    ----------
    names : tuple of str
        Patterns of the names of pairs.
    model : Path, optional
        A GGUF file.
    """

    operation: str
    library: str
    names: tuple[str, ...] = ("*",)
    turns: int = TURNS
    model: Path | None = None
    threads: int = field(default=2, kw_only=True)

    def takes(self, name: str) -> bool:
        """Whether a pair of this name is asked for."""
        return any(fnmatch.fnmatchcase(name, each) for each in self.names)


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


def work(order: StepsOrder) -> Iterator[tuple[str, ...]]:
    """A row of the table for each pair."""
    module = pkgutil.resolve_name(f"attention_benchmark.{OPERATIONS[order.operation][0]}")
    for pair in module.pairs(order):
        growths = [peak_growth(step) or 0 for step in (pair.ours, pair.other)]
        duration, (low, middle, high) = measured(pair.ours, pair.other, order.turns)
        memory = [f"{growth / 2**20:.0f} MiB" for growth in growths]
        yield pair.name, f"{duration / pair.num_steps:.2f} ms", f"{middle:.2f} ({low:.2f} to {high:.2f})", *memory


def table(orders: list[StepsOrder]) -> TextTable:
    """Time the pairs of some libraries, one process after the other.

    Raise RuntimeError when a process fails, or its two steps do not give the same.
    """
    rows = []
    with closing(workers.carried_out(work, deque(orders))) as messages:
        for worker, message in messages:
            if isinstance(message, workers.Death):
                said = message.stack.strip().rpartition("\n")[2] or message.reason
                raise RuntimeError(f"expected {worker.order.library} to be measured; its process said {said}")
            rows.append(message)
    headings = ("step", "time", "ratio, with its quartiles", "memory", "of the other")
    return TextTable(f"{orders[0].operation}, in turns", headings, rows, [])
