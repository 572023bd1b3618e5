"""Processes that carry out orders: of one that dies or hangs it is told why, and another carries out what is left."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import math
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

__all__ = ["THREADS", "Death", "Order", "carried_out"]

_OF_LIBRARIES = "OMP_NUM", "OPENBLAS_NUM", "MKL_NUM", "TF_NUM_INTRAOP", "TF_NUM_INTEROP"
THREADS = (*(f"{each}_THREADS" for each in _OF_LIBRARIES), "NPROC")
"""Environment variables by which libraries limit their threads."""


@dataclass(frozen=True)
class Death:
    """Why a process did not carry out its order.

    Attributes
    ----------
    stack : str
        What it printed last: the calls in Python that it was in, as faulthandler tells them, or a traceback.
    code : int, optional
        Its exit status, or minus a signal; None where it did not answer in time.
    """

    reason: str
    stack: str = ""
    code: int | None = None


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

    def noted(self, message: Any, at: Any) -> tuple[Any, Any]:
        """What is left of the order after a message, and where the process is then, which was at ``at``."""
        return self, message

    def lost(self, at: Any, death: Death) -> tuple[list[Any], Any]:
        """The messages in place of those of a process that died, and what another has to do; None for nothing."""
        return [death], None


def carried_out(
    orders: Iterable[Any],
    jobs: int,
    work: Callable[[Any], Iterable[Any]],
    *,
    limit: float = math.inf,
    start: float = math.inf,
) -> Generator[Any, None, None]:
    """Carry out orders, as many at a time as there are jobs; without jobs, one after the other in this process.

    Parameters
    ----------
    orders : iterable of Order
    work : callable
        From an order to messages. It is a function of a module, which other processes import.
    limit, start : float
        Seconds for each message, and for the first.

    Yields
    ------
    object
        The messages of all processes, and what `Order.lost` says of those that died.
    """
    waiting, running, arrived = deque(orders), list[_Worker](), queue.SimpleQueue[Any]()
    if not jobs:
        yield from itertools.chain.from_iterable(map(work, waiting))
        return
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_Worker(work, waiting.popleft(), start, arrived))
            worker, message = _heard(running, arrived)
            if message is None or isinstance(message, Death):
                running.remove(worker)
                worker.end(patience=0.0 if message else 5.0)  # libraries put away what they hold
            if isinstance(message, Death):
                messages, left = worker.order.lost(worker.at, message)
                waiting.extend([] if left is None else [left])
                yield from messages
            elif message is not None:
                worker.order, worker.at = worker.order.noted(message, worker.at)
                yield message
            worker.limit, worker.deadline = limit, time.monotonic() + limit
    finally:  # of an interrupt, too
        for worker in running:
            worker.end()


_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; import attention_workers; attention_workers._carry_out()"

_SIZE = 8
"""Bytes in front of a message that say how many it has."""

_TAIL = 2**16
"""Bytes of what a process printed last that a `Death` has."""


class _Worker:
    """A process at work, in a session of its own, so that no interrupt reaches it, and what it starts ends with it."""

    def __init__(self, work: Callable[[Any], Iterable[Any]], order: Any, limit: float, arrived: Any) -> None:
        self.order, self.at, self.limit, self.deadline = order, None, limit, time.monotonic() + limit
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end)
        words, environment = [sys.executable, "-c", _PROGRAM, *map(str, sys.path)], {**os.environ, **order.environment}
        streams: Any = {"stdin": PIPE, "stdout": PIPE, "stderr": self._printed}
        self.process: Any = Popen(words, env=environment, start_new_session=True, **streams)
        orders: Any = self.process.stdin
        with contextlib.suppress(OSError):  # it has died already
            pickle.dump((work, order), orders)
            orders.flush()  # and left open: its end is the end of this process
        threading.Thread(target=self._read, args=(arrived,), daemon=True).start()

    def _read(self, arrived: Any) -> None:
        """Pass on the messages, and no bytes at the end."""
        with contextlib.suppress(OSError, OverflowError, MemoryError), self.process.stdout as stream:
            while size := int.from_bytes(stream.read(_SIZE)):
                if len(data := stream.read(size)) == size:
                    arrived.put((self, data))
        arrived.put((self, b""))

    def death(self, patience: float = 0.0) -> Death:
        """Why there is no message; a process that is late, and still answers, writes where it is."""
        with contextlib.suppress(TimeoutExpired):
            self.process.wait(patience)
        code = self.process.poll()
        if code is None and hasattr(signal, "SIGUSR1"):
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
        self._printed.seek(max(self._printed.tell() - _TAIL, 0))
        stack = self._printed.read().decode(errors="replace")
        if code is None:
            return Death(f"no answer within {self.limit:g} s", stack)
        return Death(f"its process died: {_signal(code) if code < 0 else f'exit status {code}'}", stack, code)

    def end(self, patience: float = 0.0) -> None:
        """End the process, and those that it started."""
        with contextlib.suppress(TimeoutExpired):
            self.process.wait(patience)
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left, or it has just begun
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError), self._printed:
            self.process.stdin.close()


def _heard(running: list[_Worker], arrived: queue.SimpleQueue[Any]) -> tuple[_Worker, Any]:
    """The next message of a process; a `Death` where there can be none, and None after the last."""
    while True:
        left = min(each.deadline for each in running) - time.monotonic()
        try:
            worker, data = arrived.get(timeout=min(max(left, 0.0), 1.0))
        except queue.Empty:  # of a process that has died, one that it leaves may hold the pipe open
            for each in running:
                if each.deadline <= time.monotonic() or each.process.poll() is not None:
                    return each, each.death()
            continue
        if worker in running:  # and not ended already
            return worker, worker.order.unpacked(data) if data else worker.death(patience=5.0)


def _carry_out() -> None:
    """Carry out the order that the process that started this one sends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders, messages, stack = os.dup(0), open(os.dup(1), "wb"), open(os.dup(2), "wb")  # noqa: SIM115 (until the end)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what it prints is no message
    faulthandler.enable(stack)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, stack)
    with open(orders, "rb", closefd=False) as received:
        work, order = pickle.load(received)
    threading.Thread(target=_end_with, args=(orders,), daemon=True).start()
    if order.threads is not None and hasattr(os, "sched_setaffinity"):  # some libraries ignore the variables
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: order.threads])
    for message in itertools.chain(work(order), [None]):
        packed = order.packed(message)
        messages.write(len(packed).to_bytes(_SIZE) + packed)
        messages.flush()


def _end_with(other: int) -> None:
    """End as soon as the process that started this one has: the pipe from there ends then."""
    with contextlib.suppress(OSError):
        while os.read(other, 1):
            pass
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _signal(code: int) -> str:
    names = {each.value: each.name for each in signal.Signals} | {9: "SIGKILL, perhaps out of memory"}
    return names.get(-code, f"signal {-code}")
