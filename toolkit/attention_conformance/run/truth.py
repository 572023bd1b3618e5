"""The true answer to what a subject is asked: in 50 digits where that is affordable, and in a wide type elsewhere."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from attention_conformance.cases.case import Case
from attention_conformance.oracle.attention import Exact, attention
from attention_conformance.oracle.dense import answer, as_exact, dense_of
from attention_conformance.oracle.gradients import gradients as true_gradients
from attention_conformance.problem import Problem
from attention_conformance.run.question import Question
from attention_conformance.subjects.fit import meant

__all__ = ["Truth", "size_of", "truth_of"]

SMALL = 40_000
"""Products in a problem for which 50 digits are affordable."""


@dataclass(frozen=True)
class Truth:
    """The answer, result by result, and what bounds depend on."""

    arrays: dict[str, Exact]
    kappa: float


def truth_of(question: Question, problem: Problem) -> Truth:
    """The answer in 50 digits where that is affordable, and in a wide type where it is not."""
    if question.library is not None:  # the core is asked the same in many ways
        return _of_case(question.case, question.dtype)
    if question.case.closed is not None:
        output = question.case.closed(problem)
        return Truth({"output": as_exact(output, abs(output))}, 0.0)
    asked, size = meant(problem, question.subject), size_of(problem)
    changed = problem.score_mod is not None or "dropout" in problem.options or bool(problem.pieces)
    is_small = changed or (question.digits and size <= SMALL)
    if not is_small:
        wide = answer(dense_of(asked))
        return Truth({name: as_exact(each, wide.scales[name]) for name, each in wide.arrays.items()}, wide.kappa)
    return _exact(asked)


@functools.cache
def _of_case(case: Case, dtype: str) -> Truth:
    return _exact(case.problem(dtype))


def _exact(problem: Problem) -> Truth:
    exact = attention(problem)
    if problem.cotangent is not None:
        return Truth(true_gradients(problem), exact.kappa)
    return Truth({name: getattr(exact, name) for name in ("output", "weights", "logsumexp")}, exact.kappa)


def size_of(problem: Problem) -> int:
    """Products in a problem."""
    leading, heads, rows, columns = problem.sizes
    width = problem.arrays["query"].shape[-1] + problem.arrays["value"].shape[-1]
    return int(math.prod(leading) * heads * rows * columns * width)
