"""Every backend in a process of its own: one that dies fails its case, and takes nothing else along."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import attention_workers as workers
from attention_conformance.cases import CASES
from attention_conformance.run.finding import Finding, Started
from attention_conformance.run.implementations import IMPLEMENTATIONS, is_quick
from attention_conformance.run.judge import Question
from attention_conformance.run.model import ModelTrial, load_any, plan_model, run_model
from attention_conformance.run.runner import plan, run
from attention_conformance.subjects.libraries import devices_of, quiet_start
from attention_core.backend import get_backend

__all__ = ["Ended", "Message", "Order", "Plan", "Work", "execute", "work"]


@dataclass(frozen=True)
class Order(workers.Order):
    """What is to be run on one backend; ``None`` stands for all there are.

    Attributes
    ----------
    backend : str
    cases : tuple of str
    devices, dtypes, modes, implementations : tuple of str, optional
    models : tuple of Path
        Directories with an encoder or a language model, or GGUF files, to be run as well.
    quick : bool
        Whether to run eager calls in float32 alone, on the first device unless others are named. Bits are compared of
        one eager call of each case then.
    sentences : tuple of str
        What the model encodes in place of its own sentences.
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
    models: tuple[Path, ...] = ()
    quick: bool = False
    sentences: tuple[str, ...] = ()
    long: bool = False
    recipe: Any = None
    skip: int = 0


@dataclass(frozen=True)
class Plan:
    """The first message: how many trials there are, with which versions and threads, and what is left out.

    ``threads`` says what a library uses. ``left_out`` has a case, a way and a reason for all that cannot be run.
    """

    backend: str
    trials: int
    versions: dict[str, str]
    threads: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class Ended:
    """The message after the last way of a case, where bits are compared.

    ``threads`` is empty for those that a library has; ``hashes`` are those of all ways, empty for one that failed.
    """

    case: str
    backend: str
    threads: str
    hashes: tuple[str, ...]


Message: TypeAlias = Plan | Started | Finding | Ended
Work: TypeAlias = Callable[[Order], Iterator[Message]]


def work(order: Order) -> Iterator[Message]:
    """Carry out an order in this process."""
    with quiet_start():
        backend = get_backend(order.backend)
    devices = order.devices or (tuple(devices_of(backend)[:1]) if order.quick else None)
    chosen = {"devices": devices, "dtypes": order.dtypes, "modes": order.modes}
    trials: list[Question | ModelTrial] = [
        each
        for each in plan(
            [case for case in CASES if case.name in order.cases],
            [backend],
            **chosen,
            implementations=order.implementations or IMPLEMENTATIONS,
            everything=order.implementations is not None,
        )
        if not order.quick or is_quick(backend, each.mode, each.dtype, each.implementation)
    ]
    for path in order.models:
        trials += [
            each
            for each in plan_model(load_any(path), [backend], **chosen, long=order.long)
            if not order.quick or is_quick(backend, each.mode, each.dtype, "")
        ]
    yield Plan(backend.name, len(trials), backend.versions())
    for trial in trials[order.skip :]:
        yield Started(trial.blank)
        yield from run_model([trial]) if isinstance(trial, ModelTrial) else run([trial])


def execute(orders: Sequence[Order], jobs: int, worker: Work = work) -> Generator[Message, None, None]:
    """Carry out orders, as many at a time as there are jobs; without jobs, one after the other in this process."""
    if not jobs:
        for order in orders:
            yield from worker(order)
        return
    waiting = deque(orders)
    with contextlib.closing(workers.carried_out(worker, waiting, jobs)) as messages:
        for process, message in messages:
            if isinstance(message, Started):
                process.at = message
            elif isinstance(message, Finding):
                process.at, process.order = None, replace(process.order, skip=process.order.skip + 1)
            if not isinstance(message, workers.Death):
                yield message
                continue
            start = Finding("start", "-", 0, "The library loads.", "crashed", backend=process.order.backend)
            start = replace(start, device="-", mode="-", implementation="-", measure="exact")
            lost = process.at.finding if process.at else start
            yield replace(lost, verdict="crashed", error=math.inf, detail=message.reason)
            if process.at is not None:  # the case that it died of fails, and the others are run
                waiting.append(replace(process.order, skip=process.order.skip + 1))
