"""The bounds of one question, and the error of its results against them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from attention_conformance.cases.case import probability
from attention_conformance.measure.implementations import bound_of
from attention_conformance.measure.profiles import bound_for, of_narrow_weights
from attention_conformance.measure.question import Question
from attention_conformance.measure.where import Extent, located
from attention_conformance.oracle.attention import Exact, Truth
from attention_conformance.oracle.ulps import worst_error
from attention_conformance.problem import NumpyArray, Problem


@dataclass(frozen=True)
class Measured:
    """The result that comes nearest to its bound, or is farthest beyond."""

    error: float = 0.0
    bound: float = math.inf
    detail: str = ""
    result: str = ""

    @property
    def passes(self) -> bool:
        """Whether the bound is kept."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Bounds:
    """The bounds of one question; those of float32 for float64, if it is single."""

    question: Question
    problem: Problem
    truth: Truth
    is_single: bool = False

    def measure(self, got: Mapping[str, NumpyArray], expected: Mapping[str, Exact]) -> Measured:
        """The error of each result against what is expected, and the worst of them."""
        measured = []
        for name in expected:
            if name in got:
                dtype = self.dtype(name)
                error, where = worst_error(got[name], expected[name], dtype)
                measured.append(Measured(error, self.bound(name, dtype), f"{name} {where}", name))
        worst = [each for each in measured if math.isnan(each.error)] or measured
        return max(worst, key=lambda each: each.error / each.bound, default=Measured(math.inf, 0.0, "no result"))

    def located(self, measured: Measured, got: Mapping[str, NumpyArray]) -> Extent:
        """Where the errors of a wrong result are."""
        name = measured.result
        if name not in got:
            return Extent()
        return located(name, got[name], self.truth.arrays[name], self.dtype(name), measured.bound)

    def dtype(self, name: str) -> str:
        """The dtype of a result."""
        wide = "float64" if self.question.dtype == "float64" else "float32"
        return wide if name == "logsumexp" else self.question.dtype

    def bound(self, name: str, dtype: str) -> float:
        """The bound of a result: by the profile, or that of an implementation."""
        if self.is_single and dtype == "float64":
            return 2.0**29 * self.bound(name, "float32")
        case = self.question.case
        profile = self.question.profile
        stated = bound_for(profile, case, name, dtype, self.truth.kappa)
        stated += of_narrow_weights(profile, self.question.dtype) if name == "logsumexp" else 0.0
        if self.question.implementation:
            of_case = probability if name == "weights" else case.bound
            return bound_of(self.question.implementation, of_case, dtype, self.truth.kappa)
        return stated
