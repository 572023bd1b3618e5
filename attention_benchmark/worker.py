"""One framework, in the process that it has for itself.

The candidates take turns: every round has a sample of each, so that a machine that grows slower does so for all of
them. pyperf, which would time one candidate after the other in processes of their own, cannot do that.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attention_benchmark.candidate import CANDIDATES, Call, Candidate
from attention_benchmark.frameworks import Engine, device_of
from attention_benchmark.measurement import Measurement, as_row
from attention_benchmark.memory import available, peak_growth
from attention_benchmark.order import Order
from attention_benchmark.problem import NumpyArray, Problem, laid_out
from attention_benchmark.reference import TOLERANCE, Expected, expected, worst_error

__all__ = ["main", "measure", "measure_memory"]

SAMPLE = 0.005  # seconds that a sample lasts at least, in which a call that takes less is repeated
ROUNDS = (5, 30)
TELLING = 2.0**20  # scores from which on a call's time and memory are more than what every call costs
PRODUCT = {"cpu": 1024}
LARGE_PRODUCT = 8192
PLAIN_MODES = {"jax": "jit", "tensorflow": "graph"}


@dataclass
class _Entry:
    """A candidate that is ready to be timed."""

    candidate: Candidate
    run: Callable[[], Any]
    error: float | None = None
    first: float = 0.0
    repeats: int = 1
    estimate: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def sample(self) -> float:
        """Seconds of a call, waited for."""
        start = time.perf_counter()
        for _ in range(self.repeats):
            self.run()
        return (time.perf_counter() - start) / self.repeats


class RefusalError(Exception):
    """Why a candidate is not timed."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


def measure(order: Order) -> Iterator[dict[str, Any]]:
    """Time the candidates of one framework; before each is started, say so."""
    engine = _engine(order.framework)
    yield {"versions": engine.backend.versions()}
    past: dict[tuple[str, str, str], tuple[float, float, float]] = {}
    for problem in order.problems:
        wanted, entries = expected(problem), list[_Entry]()
        for candidate in _chosen(order, problem):
            yield {"started": [candidate.key, order.problems.index(problem)]}
            try:
                _check_cost(problem, candidate, past, order.limit)
                entries.append(_started(engine, problem, candidate, wanted, past))
            except RefusalError as refusal:
                yield {"measurement": as_row(Measurement(problem, candidate, refusal.outcome, str(refusal)))}
        products = _rounds(engine, problem, entries, order)
        for entry in entries:
            found = entry.error, entry.first, tuple(entry.seconds), tuple(products)
            yield {"measurement": as_row(Measurement(problem, entry.candidate, "measured", "", *found))}


def measure_memory(order: Order) -> Iterator[dict[str, Any]]:
    """Find the peak memory of a candidate, from a call that is not the first: what compiling takes is not counted."""
    engine = _engine(order.framework)
    for problem in order.problems:
        for candidate in _chosen(order, problem):
            place = [candidate.key, order.problems.index(problem)]
            yield {"started": place}
            call = candidate.prepare(problem)
            step, arguments = _step(engine, problem, candidate, call), _arguments(engine, problem, call)
            peak = engine.peak(step, arguments)
            if peak is None:
                for _ in range(2):  # a compiler may put off some of its work to the second call
                    engine.wait(step(*arguments))
                peak = peak_growth(lambda step=step, arguments=arguments: engine.wait(step(*arguments)))  # type: ignore[misc]
            yield {"memory": [*place, peak]}


def _engine(framework: str) -> Engine:
    return importlib.import_module(f"attention_benchmark.frameworks.{framework}").engine  # type: ignore[no-any-return]


def _chosen(order: Order, problem: Problem) -> list[Candidate]:
    without = {key for key, place in order.without if order.problems[place] == problem}
    return [
        each for each in CANDIDATES if each.key in order.candidates and each.takes(problem) and each.key not in without
    ]


def _step(engine: Engine, problem: Problem, candidate: Candidate, call: Call) -> Callable[..., Any]:
    return engine.step(call.function, candidate.mode, problem.direction == "both")


def _arguments(engine: Engine, problem: Problem, call: Call, cotangent: NumpyArray | None = None) -> tuple[Any, ...]:
    """Variables, constants and cotangent on the device; the last is nothing where nothing is differentiated."""
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
    wanted: Expected,
    past: dict[Any, tuple[float, float, float]],
) -> _Entry:
    """Compile a candidate, compare its result with the right one, and see how long it takes."""
    entry = _Entry(candidate, lambda: None)

    def first() -> None:
        start = time.perf_counter()
        result = step(*checking)
        engine.wait(result)
        entry.first = time.perf_counter() - start
        found = [laid_out(each, call.layout) for each in engine.backend.to_numpy(result[: 1 + len(wanted.gradients)])]
        entry.error = worst_error(found, wanted)

    try:
        call = candidate.prepare(problem)
        step, arguments = _step(engine, problem, candidate, call), _arguments(engine, problem, call)
        checking = (*arguments[:2], _arguments(engine, problem, call, wanted.cotangent)[2])
        growth = peak_growth(first) or 0
    except Exception as error:  # whatever a library raises is its reason
        raise RefusalError("refused", _reason(error)) from error
    if not entry.error <= TOLERANCE[problem.dtype]:  # type: ignore[operator]
        raise RefusalError(
            "wrong", f"expected an error of at most {TOLERANCE[problem.dtype]:.2g}; got {entry.error:.2g}"
        )
    entry.run = lambda: engine.wait(step(*arguments))
    entry.estimate = min(entry.sample() for _ in range(2)) if entry.first < 1 else entry.sample()
    entry.repeats = max(1, math.ceil(SAMPLE / entry.estimate))
    if _size(problem) >= TELLING:
        past[_kind(problem, candidate)] = (_size(problem), entry.estimate, growth)
    return entry


def _reason(error: BaseException) -> str:
    """What an error says in a line; a compiler's, about one that it met, is no reason."""
    while type(error) is not ValueError and error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(str(error).split())[:300]
    return message if type(error) is ValueError else f"{type(error).__name__}: {message}"


def _check_cost(
    problem: Problem, candidate: Candidate, past: dict[Any, tuple[float, float, float]], limit: float
) -> None:
    """Refuse what would take too long or too much, judging by what a smaller problem took."""
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
    return float(batch * heads * length**2)


def _rounds(engine: Engine, problem: Problem, entries: list[_Entry], order: Order) -> list[float]:
    """Take a sample of every candidate in every round, and of the product of large matrices."""
    if not entries:
        return []
    product, work = _product(engine, problem, order.framework)
    everyone = [*entries, *([product] if product else [])]
    a_round = sum(each.estimate * each.repeats for each in everyone)
    least, most = order.rounds or ROUNDS
    rates = []
    gc.collect()
    gc.disable()
    for number in range(min(max(int(order.seconds * len(everyone) / a_round), least), most)):
        turn = number % len(everyone)
        for entry in (*everyone[turn:], *everyone[:turn]):  # so that none always follows the same one
            entry.seconds.append(entry.sample())
        if product:
            rates.append(work / product.seconds[-1])
    gc.enable()
    return rates


def _product(engine: Engine, problem: Problem, framework: str) -> tuple[_Entry | None, float]:
    """A product of large square matrices, and its operations; of those that NumPy multiplies at speed."""
    if framework == "numpy" and problem.dtype not in ("float32", "float64"):
        return None, 0.0
    size = PRODUCT.get(problem.device, LARGE_PRODUCT)
    mode = PLAIN_MODES.get(framework, "eager")
    step = engine.step(engine.matmul, mode, False)
    factor = np.random.default_rng(1).standard_normal((size, size), dtype=np.float32)
    device = device_of(engine.backend, problem.device)
    placed = engine.backend.from_numpy((factor, factor), device=device, dtype=problem.dtype)
    entry = _Entry(CANDIDATES[0], lambda: engine.wait(step(placed, (), None)))
    entry.sample()
    entry.estimate = entry.sample()
    entry.repeats = max(1, math.ceil(SAMPLE / entry.estimate))
    return entry, 2.0 * size**3


def main() -> None:
    """Carry out the order on the standard input; a line of JSON for each message, on the standard output."""
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no message
    order = Order.read(sys.stdin.read())
    if hasattr(os, "sched_setaffinity"):  # not every library counts its threads by the environment
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: order.threads])
    for message in measure_memory(order) if order.memory else measure(order):
        messages.write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main()
