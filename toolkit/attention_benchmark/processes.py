"""Worker processes: one for each framework, so that a crash costs one candidate alone."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from attention_benchmark.candidate import FRAMEWORKS
from attention_benchmark.measurement import Measurement
from attention_benchmark.order import Order
from attention_benchmark.worker import work
from attention_workers import carried_out

Message = dict[str, Any]


def installed() -> list[str]:
    """The installed frameworks."""
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]


def measurements_of(order: Order) -> Generator[Message | Measurement, None, None]:
    """Measure time, and pass on other messages. A candidate that kills its process is not tried again.

    Raise RuntimeError when a process failed by itself, or before it came to a candidate.
    """
    return carried_out([order], 1, work)


def memory_of(order: Order, timed: Sequence[Measurement]) -> Generator[Measurement, None, None]:
    """Measure the memory of one candidate on the problems on which it was timed."""
    problems, candidates = tuple(each.problem for each in timed), (timed[0].candidate.key,)
    fresh = replace(order, problems=problems, candidates=candidates, without=(), memory=True)
    with contextlib.closing(carried_out([fresh], 1, work)) as messages:
        for message in messages:
            if "memory" in message:
                _, index, memory = message["memory"]
                yield replace(timed[index], memory=memory)
