"""The worker process: measures the candidates of one framework.

Candidates take turns: each round has one sample of each, so that changes of the machine's speed affect all of them.
pyperf times one candidate after the other, each in its own process.
"""

from __future__ import annotations

import gc
import importlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attention_benchmark.candidate import CANDIDATES, Call, Candidate
from attention_benchmark.frameworks import Engine, device_of
from attention_benchmark.measurement import Measurement
from attention_benchmark.order import Order
from attention_benchmark.problem import NumpyArray, Problem, laid_out
from attention_benchmark.reference import TOLERANCE, Expected, expected, worst_error
from attention_numpy.trees import devices_of_kind
from attention_workers.memory import available, peak_growth

SAMPLE = 0.005  # the least seconds of a sample; shorter calls are repeated
ROUNDS = (5, 30)
EXTRAPOLATED = 2.0**20  # scores: time and memory of smaller calls are mostly overhead


@dataclass
class _Entry:
    """A candidate that is ready for timing."""

    candidate: Candidate
    run: Callable[[], Any]
    error: float | None = None
    first: float = 0.0
    repeats: int = 1
    estimate: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def sample(self) -> float:
        """Seconds of a call, including its wait."""
        start = time.perf_counter()
        for _ in range(self.repeats):
            self.run()
        return (time.perf_counter() - start) / self.repeats


class RefusalError(Exception):
    """The reason why a candidate is not timed."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


def measure(order: Order) -> Iterator[dict[str, Any] | Measurement]:
    """Time the candidates of one framework, with a message before each."""
    engine = _engine(order.framework)
    devices = engine.backend.devices()
    if any(not devices_of_kind(problem.device, devices) for problem in order.problems):
        yield {"devices": devices}  # before anything is drawn
        return
    yield {"versions": engine.backend.versions()}
    past: dict[tuple[str, str, str], tuple[float, float, float]] = {}
    for problem in order.problems:
        wanted, entries = expected(problem), list[_Entry]()
        for candidate in _chosen(order, problem):
            yield {"started": [candidate.key, order.problems.index(problem)]}
            try:
                _check_cost(problem, candidate, past, order.limit)
                entries.append(_started(engine, problem, candidate, wanted=wanted, past=past))
            except RefusalError as refusal:
                yield Measurement(problem, candidate, refusal.outcome, str(refusal))
        _rounds(entries, order)
        for entry in entries:
            samples: dict[str, Any] = {"seconds": tuple(entry.seconds), "error": entry.error, "first": entry.first}
            yield Measurement(problem, entry.candidate, "measured", **samples)


def measure_memory(order: Order) -> Iterator[dict[str, Any]]:
    """Measure peak memory, of a call that is not the first: compilation is not counted."""
    engine = _engine(order.framework)
    for problem in order.problems:
        for candidate in _chosen(order, problem):
            name = [candidate.key, order.problems.index(problem)]
            yield {"started": name}
            call = candidate.prepare(problem)
            step, arguments = _step(engine, problem, candidate, call), _arguments(engine, problem, call)
            memory = engine.peak_memory(step, arguments)
            if memory is None:
                for _ in range(2):  # a compiler may defer work to the second call
                    engine.wait(step(*arguments))
                memory = peak_growth(lambda step=step, arguments=arguments: engine.wait(step(*arguments)))  # type: ignore[misc]
            yield {"memory": [*name, memory]}


def _engine(framework: str) -> Engine:
    return importlib.import_module(f"attention_benchmark.frameworks.{framework}").engine  # type: ignore[no-any-return]


def _chosen(order: Order, problem: Problem) -> list[Candidate]:
    without = {key for key, index in order.without if order.problems[index] == problem}
    return [
        each for each in CANDIDATES if each.key in order.candidates and each.takes(problem) and each.key not in without
    ]


def _step(engine: Engine, problem: Problem, candidate: Candidate, call: Call) -> Callable[..., Any]:
    return engine.step(call.function, candidate.mode, problem.direction == "fwd+bwd")


def _arguments(engine: Engine, problem: Problem, call: Call, cotangent: NumpyArray | None = None) -> tuple[Any, ...]:
    """Move variables, constants and cotangent to the device; a forward problem has a dummy cotangent."""
    if problem.direction == "forward":
        cotangent = np.zeros((), dtype=np.float32)
    else:
        cotangent = laid_out(problem.cotangent if cotangent is None else cotangent, call.layout)
    device = device_of(engine.backend, problem.device)
    variables, cotangent = engine.backend.from_numpy((call.variables, cotangent), device=device, dtype=problem.dtype)
    return variables, engine.backend.from_numpy(call.constants, device=device), cotangent


def _started(
    engine: Engine,
    problem: Problem,
    candidate: Candidate,
    *,
    wanted: Expected,
    past: dict[Any, tuple[float, float, float]],
) -> _Entry:
    """Compile a candidate, check its result, and estimate its time."""
    entry = _Entry(candidate, lambda: None)

    def first() -> None:
        start = time.perf_counter()
        result = step(*checking)
        engine.wait(result)
        entry.first = time.perf_counter() - start
        arrays = engine.backend.to_numpy(result[: 1 + len(wanted.gradients)])
        entry.error = worst_error([laid_out(each, call.layout) for each in arrays], wanted)

    try:
        call = candidate.prepare(problem)
        step, arguments = _step(engine, problem, candidate, call), _arguments(engine, problem, call)
        checking = (*arguments[:2], _arguments(engine, problem, call, wanted.cotangent)[2])
        growth = peak_growth(first) or 0
    except Exception as error:  # libraries refuse with any exception
        raise RefusalError("refused", _reason(error)) from error
    if not entry.error <= TOLERANCE[problem.dtype]:  # type: ignore[operator]
        raise RefusalError(
            "wrong", f"expected an error of at most {TOLERANCE[problem.dtype]:.2g}; got {entry.error:.2g}"
        )
    entry.run = lambda: engine.wait(step(*arguments))
    entry.estimate = min(entry.sample() for _ in range(2)) if entry.first < 1 else entry.sample()
    entry.repeats = max(1, math.ceil(SAMPLE / entry.estimate))
    if _size(problem) >= EXTRAPOLATED:
        past[_kind(problem, candidate)] = (_size(problem), entry.estimate, growth)
    return entry


def _reason(error: BaseException) -> str:
    """The message of an error in one line; of a compiler's error, that of its cause."""
    while type(error) is not ValueError and error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(str(error).split())[:300]
    return message if type(error) is ValueError else f"{type(error).__name__}: {message}"


def _check_cost(
    problem: Problem, candidate: Candidate, past: dict[Any, tuple[float, float, float]], limit: float
) -> None:
    """Refuse a problem that would take too long or too much memory, as extrapolated from a smaller one."""
    if _kind(problem, candidate) not in past:
        return
    size, seconds, memory = past[_kind(problem, candidate)]
    times = max(_size(problem) / size, 1.0)
    if seconds * times > limit:
        raise RefusalError("skipped", f"a call would take about {seconds * times:.0f} s, more than {limit:g} s")
    free = available()
    if problem.device == "cpu" and free is not None and memory * times > 0.9 * free:
        raise RefusalError(
            "skipped", f"a call could take {memory * times / 2**30:.0f} GiB, of {free / 2**30:.0f} GiB that are free"
        )


def _kind(problem: Problem, candidate: Candidate) -> tuple[str, str, str]:
    return candidate.key, problem.mask, problem.direction


def _size(problem: Problem) -> float:
    batch, heads, length, _ = problem.shape
    return float(batch * heads * problem.num_queries * length)


def _rounds(entries: list[_Entry], order: Order) -> None:
    """Take rounds of one sample of each candidate."""
    if not entries:
        return
    a_round = sum(each.estimate * each.repeats for each in entries)
    least, most = order.rounds or ROUNDS
    gc.collect()
    gc.disable()
    for number in range(min(max(int(order.seconds * len(entries) / a_round), least), most)):
        turn = number % len(entries)
        for entry in (*entries[turn:], *entries[:turn]):  # so that the order rotates
            entry.seconds.append(entry.sample())
    gc.enable()


def work(order: Order) -> Iterator[Any]:
    """Carry out an order in this process."""
    yield from measure_memory(order) if order.memory else measure(order)
