"""Orders for processes of their own, and the messages of these: whatever a process dies of, another goes on."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import attention_workers as workers
from attention_conformance.measure.finding import Finding, Started
from attention_conformance.measure.messages import Message


@dataclass(frozen=True)
class Order(workers.Order):
    """What is to be run on one backend; ``None`` stands for all there are.

    Attributes
    ----------
    devices, dtypes, modes, implementations : tuple of str, optional
    model : Path, optional
        A directory with an encoder or a language model, or a GGUF file, whose bits are compared as well.
    quick : bool
        Whether to run eager calls in float32 alone, on the first device unless others are named. Bits are compared of
        one eager call of each case then.
    long : bool
        Whether a language model continues more prompts, and in more modes.
    recipe : Recipe, optional
        What is computed in place of the cases.
    skip : int
        How many trials have been run already.
    """

    backend: str
    cases: tuple[str, ...]
    devices: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    implementations: tuple[str, ...] | None = None
    model: Path | None = None
    quick: bool = False
    long: bool = False
    recipe: Any = None
    skip: int = 0

    def noted(self, message: Message, at: Any) -> tuple[Order, Any]:
        """What is left after a message, and where the process is."""
        if isinstance(message, Finding):
            return replace(self, skip=self.skip + 1), None
        return self, message if isinstance(message, Started) else at

    def lost(self, at: Any, death: workers.Death) -> tuple[Finding, Order | None]:
        """The finding for the death of a process, and what another has to do: the case that it died of fails."""
        if at is None:
            found = Finding("start", "-", 0, "The library loads.", "crashed", backend=self.backend, measure="exact")
            found = replace(found, device="-", mode="-", implementation="-")
        else:
            found = replace(at.finding, verdict="crashed")
        left = None if at is None else replace(self, skip=self.skip + 1)
        return replace(found, error=math.inf, detail=death.reason), left


def carried_out(
    orders: Sequence[Any],
    jobs: int,
    worker: Callable[[Any], Iterator[Any]],
    *,
    limit: float = math.inf,
    start: float = math.inf,
    most: float = math.inf,
) -> Generator[Any, None, None]:
    """Carry out orders, as many at a time as there are jobs; without jobs, one after the other in this process.

    Parameters
    ----------
    worker : callable
        From an order to messages. After the death of its process, another goes on behind the case that it died of.
    limit, start : float
        Seconds for each message, and for the first.
    most : float
        Deaths after which the rest is not run.
    """
    if not jobs:
        for order in orders:
            yield from worker(order)
        return
    waiting, deaths, last = deque(orders), 0, None
    with contextlib.closing(workers.carried_out(worker, waiting, jobs, start)) as messages:
        for process, message in messages:
            if not isinstance(message, workers.Death):
                process.order, process.at = process.order.noted(message, process.at)
                process.limit, last = limit, message
                yield message
                continue
            deaths += 1
            found, left = process.order.lost(process.at, message)
            if not (isinstance(last, Finding) and last.verdict == "crashed"):  # which told it already
                yield found
            if left is None:
                continue
            if deaths >= most:
                detail = f"{deaths} crashes: the rest is not run"
                yield Finding("end", "-", 0, "The run goes on after a crash.", "crashed", detail=detail)
                return
            waiting.append(left)
