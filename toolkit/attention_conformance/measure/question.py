"""What is asked of a kernel: one case, in one way, and how the answer is judged."""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from attention_conformance.cases.case import Case
from attention_conformance.launch.fit import meant
from attention_conformance.launch.libraries import in_precision
from attention_conformance.launch.subject import Subject
from attention_conformance.measure.finding import Finding
from attention_conformance.oracle.attention import Truth, attention
from attention_conformance.oracle.dense import answer, as_exact, dense_of
from attention_conformance.oracle.gradients import gradients as true_gradients
from attention_conformance.problem import Problem
from attention_core.backend import Backend, get_backend


@dataclass(frozen=True)
class Question:
    """One case for one kernel, and how it is judged.

    ``digits`` asks for the oracle of 50 digits where a problem is small, which takes longer.
    Without ``is_trusted``, calls of the framework's own attention are found.
    ``other`` is the kernel whose bits are compared. ``mode`` is how its library runs a call, by default eagerly, or as
    one program where it compiles each operation for itself otherwise.
    ``variables`` are the arrays whose gradients are asked for, by default all, and ``between`` is called before the
    backward pass.
    Without ``causes``, a wrong answer is compared with conventions alone, so that it is soon known to be wrong.
    The core is asked on a ``library`` for an ``implementation``, unless there is a ``reason`` not to.
    """

    kernel: Subject
    case: Case
    dtype: str
    profile: str = "kernel"
    seed: int = 0
    power: bool = True
    digits: bool = True
    causes: bool = True
    is_trusted: bool = True
    variables: tuple[str, ...] = ()
    between: Problem | None = None
    other: Subject | None = None
    mode: str = ""
    library: Backend | None = None
    implementation: str = ""
    reason: str = ""

    @property
    def backend(self) -> Backend:
        """The library of the kernel."""
        return self.library or get_backend(self.kernel.backend or "numpy")

    @property
    def device(self) -> str:
        """The device that the kernel computes on."""
        return self.kernel.device or self.backend.devices()[0]

    @property
    def widths(self) -> tuple[tuple[str, int], ...]:
        """Widths of heads in place of those of the catalogue, where a kernel is asked: many take one width for all."""
        is_kernel = not self.kernel.native or self.implementation == "fused"
        return (("width", 16), ("value_width", 16)) if is_kernel else ()

    @property
    def narrow_is_habit(self) -> bool:
        """Whether scores of 16 bits are a habit of a plain formula, whose other faults float32 shows."""
        return self.profile != "exact" and "float32" in (self.kernel.dtypes or ())

    def in_precision(self) -> AbstractContextManager[Any]:
        """The context in which its library computes in the dtype."""
        return in_precision(self.backend, self.dtype)

    @property
    def blank(self) -> Finding:
        """What is known before a call."""
        case = self.case
        result = Finding(case.name, self.dtype, case.line, case.shows, "right", seed=self.seed)
        if self.library is None:
            return result
        result = replace(result, backend=self.library.name, device=self.device, mode=self.mode)
        return replace(result, implementation=self.implementation, measure=case.measure)


SMALL = 40_000
"""Products in a problem for which 50 digits are affordable."""


def truth_of(question: Question, problem: Problem) -> Truth:
    """The answer in 50 digits where that is affordable, and in a wide type where it is not."""
    if question.library is not None:  # the core is asked the same in many ways
        return _of_case(question.case, question.dtype, question.widths)
    if question.case.closed is not None:
        output = question.case.closed(problem)
        return Truth({"output": as_exact(output, abs(output))}, 0.0)
    asked, size = meant(problem, question.kernel), size_of(problem)
    changed = problem.score_mod is not None or "dropout" in problem.options or bool(problem.pieces)
    is_small = changed or (question.digits and size <= SMALL)
    if not is_small:
        wide = answer(dense_of(asked))
        names = {*wide.arrays} - ({"weights"} if not question.kernel.gives("weights") else set())
        return Truth(wide.exact(names), wide.kappa)
    return _exact(asked)


@functools.cache
def _of_case(case: Case, dtype: str, widths: tuple[tuple[str, int], ...]) -> Truth:
    return _exact(case.problem(dtype, **dict(widths)))


def _exact(problem: Problem) -> Truth:
    truth = attention(problem)
    return truth if problem.cotangent is None else replace(truth, arrays=true_gradients(problem))


def size_of(problem: Problem) -> int:
    """Products in a problem."""
    leading, heads, rows, columns = problem.sizes
    width = problem.arrays["query"].shape[-1] + problem.arrays["value"].shape[-1]
    return int(math.prod(leading) * heads * rows * columns * width)
