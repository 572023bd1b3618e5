"""Worker processes: one for each framework, so that a crash costs one candidate alone."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from attention_benchmark.candidate import CANDIDATES, FRAMEWORKS, Candidate
from attention_benchmark.measurement import Measurement, of_row
from attention_benchmark.memory import SETTINGS
from attention_benchmark.order import Order
from attention_benchmark.problem import Problem

__all__ = ["DiedError", "Message", "execute", "installed", "measurements_of", "memory_of"]

Message = dict[str, Any]


class DiedError(Exception):
    """The system ended a process."""


def installed() -> list[str]:
    """The installed frameworks."""
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]


def measurements_of(order: Order) -> Generator[Message | Measurement, None, None]:
    """Measure time, and pass on other messages. A candidate that kills its process is not tried again."""
    problems = list(order.problems)
    while problems:
        started: tuple[str, int] | None = None
        rest = replace(order, problems=tuple(problems))
        try:
            with contextlib.closing(execute(rest)) as messages:
                for message in messages:
                    if "started" in message:
                        started = (message["started"][0], message["started"][1])
                    if "measurement" in message:
                        yield of_row(message["measurement"])
                    else:
                        yield message
            return
        except DiedError as death:
            if started is None:
                raise
            key, first = started
            # All problems before this one are measured; of this one, only refusals were reported.
            order, problems = _without(rest, key, first)
            for index in sorted(index for other, index in order.without if other == key):
                yield Measurement(problems[index], _candidate(order, key), "died", str(death))


def _without(order: Order, key: str, first: int) -> tuple[Order, list[Problem]]:
    """The order from a problem on, without a candidate on all problems of its direction that are as large."""
    problems = list(order.problems[first:])
    kept = [(other, index - first) for other, index in order.without if index >= first]
    too_large = [
        (key, index)
        for index, each in enumerate(problems)
        if each.direction == problems[0].direction and each.shape >= problems[0].shape
    ]
    return replace(order, without=(*kept, *too_large)), problems


def memory_of(order: Order, timed: Sequence[Measurement]) -> Generator[Measurement, None, None]:
    """Measure the memory of one candidate on the problems on which it was timed."""
    fresh = replace(
        order,
        problems=tuple(each.problem for each in timed),
        candidates=(timed[0].candidate.key,),
        without=(),
        memory=True,
    )
    # If it dies, its memory stays unknown.
    with contextlib.suppress(DiedError), contextlib.closing(execute(fresh)) as messages:
        for message in messages:
            if "memory" in message:
                _, index, memory = message["memory"]
                yield replace(timed[index], memory=memory)


def execute(order: Order) -> Generator[Message, None, None]:
    """Carry out an order in a fresh process.

    Raises
    ------
    DiedError
        When the system ended it.
    RuntimeError
        When it failed by itself.
    """
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "attention_benchmark.worker"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        # In a session of its own it does not see the interrupt of a terminal, and ends with whoever started it.
        process = subprocess.Popen(command, **pipes, env=_environment(order), start_new_session=True)
        with process, process.stdin as orders, process.stdout as messages:  # type: ignore[union-attr]
            try:
                with contextlib.suppress(BrokenPipeError):  # of one that has ended, which its status tells
                    orders.write(order.write())
                    orders.close()
                for line in messages:
                    yield json.loads(line)
            except BaseException:
                _kill(process)
                raise
        if process.returncode < 0:
            raise DiedError(f"its process died: {signal.Signals(-process.returncode).name}")
        if process.returncode:
            log.seek(0)
            said = log.read().strip().rpartition("\n")[2]
            raise RuntimeError(f"expected {order.framework} to be measured; its process said {said}")


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process, with those that compilers have started in its session."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _environment(order: Order) -> dict[str, str]:
    device, dtype = order.problems[0].device, order.problems[0].dtype
    settings = {
        "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
        "JAX_ENABLE_X64": str(int(dtype == "float64")),
        "KERAS_TORCH_DEVICE": device,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    settings |= {f"{name}_NUM_THREADS": str(order.threads) for name in ("OMP", "OPENBLAS", "MKL")}
    if order.framework in ("torch", "jax", "tensorflow"):
        settings["KERAS_BACKEND"] = order.framework
    if order.memory:
        settings |= SETTINGS
    return os.environ | settings


def _candidate(order: Order, key: str) -> Candidate:
    return next(each for each in (*CANDIDATES, *order.foreign) if each.key == key)
