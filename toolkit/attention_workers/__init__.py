"""Processes that carry out orders: of one that dies or hangs it is told why, and whoever follows may go on after it."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["THREADS", "Death", "Order", "Worker", "blocked_interrupts", "carried_out"]

THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "NPROC",
)
"""Environment variables by which libraries limit their threads."""
_STARTING = threading.Lock()  # of one process at a time, as each has an environment of its own


@dataclass(frozen=True)
class Order:
    """What a process is to do.

    Attributes
    ----------
    threads : int, optional
        How many threads a library may start; a process that is running keeps those it has.
    """

    threads: int | None = field(default=None, kw_only=True)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that a process finds, as libraries read them when they are imported."""
        return {} if self.threads is None else dict.fromkeys(THREADS, str(self.threads))

    def packed(self, message: Any) -> bytes:
        """A message as the process sends it."""
        return pickle.dumps(message)

    def unpacked(self, data: bytes) -> Any:
        """The message that was sent, by a process that is trusted as this one is."""
        return pickle.loads(data)


@dataclass(frozen=True)
class Death:
    """The last message of a process that did not carry out its order.

    Attributes
    ----------
    stack : str
        The calls in Python that it was in, as faulthandler tells them, or the traceback of an exception.
    code : int, optional
        Its exit status, or minus a signal; None where it did not answer in time.
    """

    reason: str
    stack: str = ""
    code: int | None = None


class Worker:
    """A process at work.

    Attributes
    ----------
    order : Order
        Who follows the messages may exchange it for what is left of it.
    at : object
        Where the process is, as who follows the messages notes it.
    limit : float
        Seconds for the next message.
    """

    def __init__(self, work: Callable[[Any], Iterable[Any]], order: Any, limit: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.order, self.limit, self.since = order, limit, time.monotonic()
        self.at: Any = None
        self.connection, sender = context.Pipe(duplex=False)
        file, self._stack = tempfile.mkstemp(prefix="attention-", suffix=".stack")
        os.close(file)
        arguments = (work, order, sender, self._stack)
        self.process: BaseProcess = context.Process(target=_child, args=arguments, daemon=True)
        with _environment(order.environment):  # which the process finds
            self.process.start()
        sender.close()  # so that the end of the process is the end of the messages

    @property
    def left(self) -> float:
        """The seconds that are left for the next message."""
        return self.since + self.limit - time.monotonic()

    def receive(self) -> Any:
        """The next message; a `Death` where none can come, and None after the last."""
        if self.connection.poll():
            with contextlib.suppress(EOFError):
                return self.order.unpacked(self.connection.recv_bytes())
        elif self.left <= 0 and self.process.is_alive():
            return Death(f"no answer within {self.limit:g} s", self._stack_of_hang())
        self.process.join(5)  # a child that it leaves may hold the connection open
        code = self.process.exitcode or 0
        end = _signal(code) if code < 0 else f"exit status {code}"
        return Death(f"its process died: {end}", self._stack_text(), code)

    def _stack_of_hang(self) -> str:
        """Let a process that hangs write where it is, if it still answers."""
        if hasattr(signal, "SIGUSR1") and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR1)
                self.process.join(0.2)
        return self._stack_text()

    def _stack_text(self) -> str:
        try:
            return Path(self._stack).read_text()
        except (OSError, UnicodeDecodeError):
            return ""

    def end(self) -> None:
        """End the process, and those that it started."""
        if hasattr(os, "killpg") and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left, or it has just begun
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()
        Path(self._stack).unlink(missing_ok=True)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for a while, and leave all others alone, which other threads may read or set."""
    with _STARTING:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def carried_out(
    work: Callable[[Any], Iterable[Any]], orders: deque[Any], jobs: int = 1, limit: float = math.inf
) -> Generator[tuple[Worker, Any], None, None]:
    """Carry out orders, as many at a time as there are jobs.

    Parameters
    ----------
    work : callable
        From an order to messages, in a process of its own.
    orders : deque of Order
        It may grow meanwhile: after a `Death` by what is left.
    limit : float
        Seconds for each message, until `Worker.limit` is another.

    Yields
    ------
    (Worker, object)
        Each message with the process that sent it.
    """
    running: list[Worker] = []
    try:
        while orders or running:
            while orders and len(running) < jobs:
                with blocked_interrupts():
                    running.append(Worker(work, orders.popleft(), limit))
            for worker in _heard(running):
                message = worker.receive()
                if message is None:
                    worker.process.join(5)  # so that libraries put away what they hold
                if message is None or isinstance(message, Death):
                    running.remove(worker)
                    worker.end()
                if message is not None:
                    yield worker, message
                worker.since = time.monotonic()
    finally:  # of an interrupt, too
        for worker in running:
            worker.end()


def _heard(running: list[Worker]) -> list[Worker]:
    """Wait for processes that sent a message, ended, or are late."""
    while True:
        left = max(0.0, min(each.left for each in running))
        ready = wait(
            [part for each in running for part in (each.connection, each.process.sentinel)],
            None if left == math.inf else left,
        )
        found = [each for each in running if {each.connection, each.process.sentinel} & {*ready} or each.left <= 0]
        if found:
            return found


@contextlib.contextmanager
def blocked_interrupts() -> Iterator[None]:
    """Put off interrupts; a process that is started here never sees one, and is ended by the one that started it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starting the first process would start it, and it lets interrupts through again
    arrived: list[int] = []  # as the handlers of Python run where a thread of a library lets a signal through
    main = threading.current_thread() is threading.main_thread()  # the one that has handlers
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP] if main else []
    handlers = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    for number in handlers:
        signal.signal(number, lambda number, _: arrived.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)


def _child(work: Callable[[Any], Iterable[Any]], order: Order, connection: Connection, stack: str) -> None:
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # so that what it starts ends with it
    if order.threads is not None and hasattr(os, "sched_setaffinity"):  # some libraries ignore the variables
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: order.threads])
    file = open(stack, "w")  # noqa: SIM115 (until the process ends)
    faulthandler.enable(file)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")  # of libraries, about themselves
    os.dup2(2, 1)  # the standard output is the report's
    try:
        for message in work(order):
            connection.send_bytes(order.packed(message))
    except Exception:
        traceback.print_exc(file=file)
        raise
    connection.send_bytes(order.packed(None))


def _signal(code: int) -> str:
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        return f"{name}, perhaps out of memory" if name == "SIGKILL" else name
    return f"signal {-code}"
