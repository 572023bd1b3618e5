"""Worker processes: one for each framework, so that a crash costs one candidate alone."""

from __future__ import annotations

import contextlib
import importlib.util
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from attention_benchmark.candidate import CANDIDATES, FRAMEWORKS
from attention_benchmark.measurement import Measurement
from attention_benchmark.order import Order
from attention_benchmark.worker import work
from attention_workers import Death, carried_out

Message = dict[str, Any]


def installed() -> list[str]:
    """The installed frameworks."""
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]


def measurements_of(order: Order) -> Generator[Message | Measurement, None, None]:
    """Measure time, and pass on other messages. A candidate that kills its process is not tried again.

    Raise RuntimeError when a process failed by itself, or before it came to a candidate.
    """
    orders = deque([order])
    with contextlib.closing(carried_out(work, orders)) as messages:
        for worker, message in messages:
            if isinstance(message, Measurement):
                yield message
            elif not isinstance(message, Death):
                worker.at = message.get("started")
                yield message
            else:
                _check_killed(message, order)
                if worker.at is None:
                    raise RuntimeError(f"expected {order.framework} to be measured; got none: {message.reason}")
                key, first = worker.at
                # All problems before this one are measured; of this one, only refusals were reported.
                rest = _without(worker.order, key, first)
                candidate = next(each for each in CANDIDATES if each.key == key)
                for index in sorted(index for other, index in rest.without if other == key):
                    yield Measurement(rest.problems[index], candidate, "died", message.reason)
                orders.append(rest)


def _check_killed(death: Death, order: Order) -> None:
    """Refuse a process that failed by itself, and that the system did not end."""
    if death.code is not None and death.code >= 0:
        said = death.stack.strip().rpartition("\n")[2] or death.reason
        raise RuntimeError(f"expected {order.framework} to be measured; its process said {said}")


def _without(order: Order, key: str, first: int) -> Order:
    """The order from a problem on, without a candidate on all problems of its direction that are as large."""
    problems = order.problems[first:]
    kept = [(other, index - first) for other, index in order.without if index >= first]
    too_large = [
        (key, index)
        for index, each in enumerate(problems)
        if each.direction == problems[0].direction and each.shape >= problems[0].shape
    ]
    return replace(order, problems=problems, without=(*kept, *too_large))


def memory_of(order: Order, timed: Sequence[Measurement]) -> Generator[Measurement, None, None]:
    """Measure the memory of one candidate on the problems on which it was timed."""
    fresh = replace(
        order,
        problems=tuple(each.problem for each in timed),
        candidates=(timed[0].candidate.key,),
        without=(),
        memory=True,
    )
    with contextlib.closing(carried_out(work, deque([fresh]))) as messages:
        for _, message in messages:
            if isinstance(message, Death):
                _check_killed(message, order)  # of one that was, the memory stays unknown
            elif "memory" in message:
                _, index, memory = message["memory"]
                yield replace(timed[index], memory=memory)
