"""Every backend in a process of its own: one that dies fails its case, and takes nothing else along."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

from attention_conformance.cases import CASES
from attention_conformance.result import Result
from attention_conformance.run.implementations import IMPLEMENTATIONS, is_quick
from attention_conformance.run.measures import Trial
from attention_conformance.run.model import ModelTrial, load_any, plan_model, run_model
from attention_conformance.run.runner import plan, run
from attention_conformance.subjects.libraries import THREADS, devices_of, quiet_start
from attention_core.backend import get_backend

__all__ = ["Ended", "Message", "Order", "Plan", "Started", "blocked_interrupts", "execute", "work"]


@dataclass(frozen=True)
class Order:
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
    threads : int, optional
        How many threads a library may start; a process that is running keeps those it has.
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
    threads: int | None = None
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
class Started:
    """The message before each result: what is being run."""

    case: str
    backend: str
    device: str
    dtype: str
    mode: str
    implementation: str
    measure: str


@dataclass(frozen=True)
class Ended:
    """The message after the last way of a case, where bits are compared.

    ``threads`` is empty for those that a library has; ``hashes`` are those of all ways, empty for one that failed.
    """

    case: str
    backend: str
    threads: str
    hashes: tuple[str, ...]


Message: TypeAlias = Plan | Started | Result | Ended
Worker: TypeAlias = Callable[[Order], Iterator[Message]]


def work(order: Order) -> Iterator[Message]:
    """Carry out an order in this process."""
    with quiet_start():
        backend = get_backend(order.backend)
    devices = order.devices or (tuple(devices_of(backend)[:1]) if order.quick else None)
    chosen = {"devices": devices, "dtypes": order.dtypes, "modes": order.modes}
    trials: list[Trial | ModelTrial] = [
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
            if not order.quick or is_quick(backend, each.mode, each.dtype, None)
        ]
    yield Plan(backend.name, len(trials), backend.versions())
    for trial in trials[order.skip :]:
        case, implementation, measure = "model", "", "ulp"
        if isinstance(trial, Trial):
            case, implementation, measure = trial.case.name, trial.implementation or "", trial.case.measure
        yield Started(
            case,
            backend.name,
            trial.device,
            trial.dtype,
            mode=trial.mode,
            implementation=implementation,
            measure=measure,
        )
        yield next(run([trial]) if isinstance(trial, Trial) else run_model([trial]))


def execute(orders: Sequence[Order], jobs: int, worker: Worker = work) -> Generator[Message, None, None]:
    """Carry out orders, as many at a time as there are jobs; without jobs, one after the other in this process."""
    if not jobs:
        for order in orders:
            yield from worker(order)
        return
    waiting, running = deque(orders), dict[Connection, _Running]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                _start(waiting.popleft(), worker, running)
            ready = wait(running)
            for connection in [each for each in running if each in ready]:
                try:
                    yield running[connection].note(connection.recv())
                except EOFError:
                    yield from _ended(running.pop(connection), waiting)
    finally:  # of an interrupt, too
        for entry in running.values():
            entry.process.kill()
            entry.process.join()


@dataclass
class _Running:
    order: Order
    process: BaseProcess
    started: Started | None = None
    finished: int = field(default=0)

    def note(self, message: Message) -> Message:
        """Keep track of where the process is."""
        if isinstance(message, Started):
            self.started = message
        elif isinstance(message, Result):
            self.started, self.finished = None, self.finished + 1
        return message


def _start(order: Order, worker: Worker, running: dict[Connection, _Running]) -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(worker, order, sender), daemon=True)
    with blocked_interrupts(), _limited_threads(order.threads):
        process.start()
        running[receiver] = _Running(order, process)
    sender.close()  # so that the end of the process is the end of the messages


@contextlib.contextmanager
def blocked_interrupts() -> Iterator[None]:
    """Put off interrupts; a process that is started here never sees one, and is ended by the one that started it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starting the first process would start it, and it lets interrupts through again
    with _deferred_handlers():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _deferred_handlers() -> Iterator[None]:
    """Call handlers afterwards: a signal that another thread receives would interrupt this one within the start."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []
    handlers: dict[int, Any] = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in seen:
            signal.raise_signal(number)


@contextlib.contextmanager
def _limited_threads(threads: int | None) -> Iterator[None]:
    """Let a process that is started here find a number of threads, which libraries read when they are imported."""
    if threads is None:
        yield
        return
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, str(threads)))
    try:
        yield
    finally:
        for name, setting in before.items():
            if setting is None:
                del os.environ[name]
            else:
                os.environ[name] = setting


def _child(worker: Worker, order: Order, connection: Connection) -> None:
    if order.threads is not None and hasattr(os, "sched_setaffinity"):  # some libraries ignore the variables
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: order.threads])
    warnings.simplefilter("ignore")  # of libraries, about themselves: what goes wrong in a case is in its result
    logging.disable(logging.CRITICAL)
    for message in worker(order):
        connection.send(message)


def _ended(entry: _Running, waiting: deque[Order]) -> Iterator[Message]:
    """Fail the case that a process died of, and order what was to come after it."""
    entry.process.join()
    code = entry.process.exitcode
    if code == 0:
        return
    died = f"its process died: {signal.Signals(-code).name if code is not None and code < 0 else f'exit status {code}'}"
    lost = entry.started or Started(
        "start", entry.order.backend, "-", "-", mode="-", implementation="-", measure="exact"
    )
    names = (lost.case, lost.backend, lost.device, lost.dtype, lost.mode, lost.implementation, lost.measure)
    yield Result(*names, math.inf, math.nan, False, died, 0.0)
    if entry.started is not None:
        waiting.append(replace(entry.order, skip=entry.order.skip + entry.finished + 1))
