"""How a kernel is asked: one call, or several that must agree."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from attention_conformance.cases.case import Case
from attention_conformance.cases.kernels import asking
from attention_conformance.launch.borrowed import nothing_borrowed
from attention_conformance.launch.call import gradients, outputs, place, to_numpy
from attention_conformance.launch.watch import Touched, poisoned, shared, watched
from attention_conformance.measure.finding import CONVENTION
from attention_conformance.measure.implementations import of_implementation
from attention_conformance.measure.question import Question
from attention_conformance.oracle.ulps import difference
from attention_conformance.problem import NumpyArray, Problem
from attention_workers.memory import resident

CALLS = 8
"""Equal calls whose bits are compared."""


def drawn(question: Question) -> Problem:
    """The problem of a case, as an implementation can be asked."""
    problem = _problem(question.case, question.dtype, question.seed, question.widths)
    arrays = {name: each.copy() for name, each in problem.arrays.items()}  # as a kernel may write into them
    return of_implementation(problem.changed(arrays=arrays), question.implementation)


@functools.lru_cache(1)
def _problem(case: Case, dtype: str, seed: int, widths: tuple[tuple[str, int], ...]) -> Problem:
    """The problem of a case, which is asked for several times on end."""
    return case.problem(dtype, seed, **dict(widths))


def variables(question: Question, problem: Problem) -> list[str]:
    """The arrays whose gradients are compared: those of the case, and of no mask that became a bias."""
    if question.variables:
        return list(question.variables)
    names = [name for name in drawn(question).variables if name in problem.arrays]
    return [name for name in names if name in ("query", "key", "value")] if question.kernel.backward else names


def result_of(question: Question, problem: Problem, *, poison: bool = False) -> dict[str, NumpyArray]:
    """One call: its results, once its arguments are seen to be untouched."""
    kernel, backend = question.kernel, question.backend
    xp = backend.namespace
    arrays = place(problem, kernel, backend, question.device)
    with watched(arrays, backend), poisoned(backend, poison), nothing_borrowed(not question.is_trusted):
        if problem.cotangent is not None:
            names = variables(question, problem)
            more = _between(question), question.library is not None
            results = compiled(question, lambda x: gradients(problem, kernel, x, names, backend, *more))(arrays)
        else:
            results = compiled(question, lambda placed: outputs(problem, kernel, placed, xp))(arrays)
            shared(results, arrays, backend)
    return to_numpy(results, backend)


def _between(question: Question) -> Callable[[], Any] | None:
    """The forward pass of another problem."""
    other, kernel, backend = question.between, question.kernel, question.backend
    if other is None:
        return None
    return lambda: outputs(other, kernel, place(other, kernel, backend, question.device), backend.namespace)


def compiled(question: Question, function: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """The whole call as one program, where a library compiles each operation for itself otherwise."""
    reads_masks = hasattr(question.kernel.function, "reads_masks")
    mode = question.mode or ("jit" if question.backend.name == "jax" and not reads_masks else "eager")
    return question.backend.compile(function, mode=mode)


def plain(question: Question, problem: Problem) -> dict[str, NumpyArray]:
    """One call, after those that a case has before it."""
    taken = question.kernel.dtypes or (question.dtype,)
    for earlier in asking(question.case, problem, question.seed):
        may_raise = earlier.arrays["query"].dtype.name not in taken
        with contextlib.suppress(*[Exception] * may_raise):
            result_of(question, earlier)
    return result_of(question, problem, poison=question.library is None and not question.case.before)


def _twice(question: Question, problem: Problem) -> dict[str, NumpyArray]:
    first = result_of(question, problem)
    for number in range(2, CALLS + 1):
        again = result_of(question, problem)
        for name, array in first.items():
            if unlike := difference(array, again[name]):
                detail = f"{name} of call {number} has other bits than that of the first: {unlike.text(name)}"
                raise Touched(detail, "other-bits")
    return again


def _bits(question: Question, problem: Problem) -> dict[str, NumpyArray]:
    """Results whose output must be that of the twin, bit by bit."""
    if question.case.twin is None:
        raise ValueError(f"expected case {question.case.name} to have a twin; got none")
    results, twin = result_of(question, problem), result_of(question, question.case.twin(problem))
    if unlike := difference(results["output"], twin["output"]):
        raise Touched(f"asking for weights and logsumexp changes bits of the output: {unlike.text('output')}")
    return results


def _placed(question: Question, problem: Problem) -> dict[str, Any]:
    return place(problem, question.kernel, question.backend, question.device)


def _overwritten(question: Question, problem: Problem) -> dict[str, NumpyArray]:
    """A call, and another after new numbers came into the same memory."""
    backend = question.backend
    if backend.name not in ("numpy", "torch"):
        return result_of(question, problem)
    arrays = _placed(question, problem.turned())
    outputs(problem, question.kernel, arrays, backend.namespace)
    for name, array in _placed(question, problem).items():
        arrays[name][...] = array
    views = {name: each[...] for name, each in arrays.items()}
    with watched(arrays, backend):  # what is written into an argument is not kept
        kept = to_numpy(outputs(problem, question.kernel, arrays, backend.namespace), backend)
    results = to_numpy(outputs(problem, question.kernel, views, backend.namespace), backend)
    if any(each.tobytes() != results[name].tobytes() for name, each in kept.items()):
        raise Touched("other objects of the same memory give another answer", "kept-by-identity", CONVENTION)
    return results


def _freed(question: Question, problem: Problem) -> dict[str, NumpyArray]:
    """Calls with arrays of their own, during which the process must not grow by what they got."""
    results = result_of(question, problem)
    for _ in range(4):
        result_of(question, problem)
    before, size = resident(), sum(each.nbytes for each in problem.arrays.values())
    for _ in range(24):
        results = result_of(question, problem)
    grown = resident() - before
    if grown > 10 * size:
        kept = f"24 calls with arguments of {size / 2**20:.1f} MiB each kept {grown / 2**20:.1f} MiB"
        raise Touched(kept, "kept-memory")
    return results


MEASURES: dict[str, Callable[[Question, Problem], dict[str, NumpyArray]]] = {
    "twice": _twice,
    "exact": _bits,
    "overwritten": _overwritten,
    "freed": _freed,
}
"""Measures by name, besides those of several problems; `plain` for all others."""
