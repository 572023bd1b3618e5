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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from attention_benchmark.candidate import CANDIDATES, FRAMEWORKS
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


def measurements_of(order: Order) -> Iterator[Message | Measurement]:
    """Measure time, and pass on other messages. A candidate that kills its process is not tried again."""
    problems = list(order.problems)
    while problems:
        started: tuple[str, int] | None = None
        rest = replace(order, problems=tuple(problems))
        try:
            for message in execute(rest):
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
                yield Measurement(problems[index], _candidate(key), "died", str(death))


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


def memory_of(order: Order, timed: Sequence[Measurement]) -> Iterator[Measurement]:
    """Measure the memory of one candidate on the problems on which it was timed."""
    fresh = replace(
        order,
        problems=tuple(each.problem for each in timed),
        candidates=(timed[0].candidate.key,),
        without=(),
        memory=True,
    )
    with contextlib.suppress(DiedError):  # its memory stays unknown
        for message in execute(fresh):
            if "memory" in message:
                _, index, memory = message["memory"]
                yield replace(timed[index], memory=memory)


def execute(order: Order) -> Iterator[Message]:
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
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=_environment(order)
        )
        with process, process.stdin as orders, process.stdout as messages:  # type: ignore[union-attr]
            orders.write(order.write())
            orders.close()
            for line in messages:
                yield json.loads(line)
        if process.returncode < 0:
            raise DiedError(f"its process died: {signal.Signals(-process.returncode).name}")
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"expected {order.framework} to be measured; its process said\n{log.read()[-2000:]}")


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


def _candidate(key: str) -> Any:
    return next(each for each in CANDIDATES if each.key == key)
