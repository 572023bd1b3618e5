"""What a wrong answer equals: conventions, faults, and arrays of another call, each compared with what was returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from attention_conformance.oracle.attention import Exact
from attention_conformance.oracle.dense import Answer, answer, as_exact, dense_of
from attention_conformance.oracle.diagnoses import DIAGNOSES
from attention_conformance.oracle.reach import reached
from attention_conformance.oracle.variants import CONVENTIONS, FAULTS, LEAK, NARROW, SPREAD, Variant
from attention_conformance.problem import NumpyArray, Problem
from attention_conformance.run.former import mistaken
from attention_conformance.run.truth import size_of
from attention_conformance.subjects.fit import meant

if TYPE_CHECKING:
    from attention_conformance.run.judge import Bounds, Question

__all__ = ["Variants", "power"]

MOST_PLANTED = 10_000_000
"""Products in a problem above which no faults are planted."""


class Variants:
    """Other answers to one problem, each computed when it is asked for."""

    def __init__(self, problem: Problem | None) -> None:
        self._dense = None
        if problem is not None and problem.score_mod is None and "dropout" not in problem.options:
            self._dense = None if problem.pieces else dense_of(problem)

    def of(self, variant: Variant) -> Answer | None:
        """The answer of a variant; None where it does not apply, or cannot be computed."""
        try:
            return None if self._dense is None else variant.answer(self._dense)
        except (ValueError, IndexError, MemoryError):  # a fault that these shapes do not take
            return None

    def _others(self, bounds: Bounds) -> Iterator[tuple[Variant, Answer | None]]:
        """All variants with their answers, the likeliest first."""
        for variant in CONVENTIONS:
            yield variant, self.of(variant)
        question = bounds.question
        if self._dense is not None:
            for variant, problem in mistaken(question.case, bounds.problem, question.subject, question.seed):
                yield variant, answer(dense_of(meant(problem, question.subject)))
        for variant in (*FAULTS, *DIAGNOSES):
            yield variant, self.of(variant)

    def _of_nan(self, got: Mapping[str, NumpyArray], bounds: Bounds) -> Variant | None:
        """What explains NaN where a number is expected: the habits of formulas with masks, or that NaN spreads."""
        dense, truth = self._dense, bounds.truth.arrays
        if dense is None or any(each.shape != truth[name].high.shape for name, each in got.items()):
            return None
        if bool(np.isfinite(dense.key).all() and np.isfinite(dense.value).all()):
            return None
        nan = {name: np.isnan(each.astype(np.float64)) for name, each in got.items()}
        reach = reached(dense)
        for expected in (truth, *self._by_convention(got)):
            mended = {name: _mended(each, nan[name] & reach[name], expected[name]) for name, each in got.items()}
            leaks = any((nan[name] & reach[name] & ~np.isnan(expected[name].high)).any() for name in got)
            if leaks and bounds.measure(mended, expected).passes:
                return LEAK
        mended = {name: _mended(each, nan[name], truth[name]) for name, each in got.items()}
        return SPREAD if bounds.measure(mended, truth).passes else None

    def _by_convention(self, got: Mapping[str, NumpyArray]) -> Iterator[dict[str, Exact]]:
        """The answers of the other conventions, which a leak may come on top of."""
        for variant in CONVENTIONS:
            other = self.of(variant)
            if other is not None and set(got) <= set(other.arrays):
                yield {name: as_exact(other.arrays[name], other.scales[name]) for name in got}

    def equal(self, got: Mapping[str, NumpyArray], bounds: Bounds, wrong: str) -> Variant | None:
        """The first variant that a wrong result equals, and all others with it."""
        if bounds.question.case.closed is not None:
            return None
        if of_nan := self._of_nan(got, bounds):  # first, as what is all NaN equals many faults
            return of_nan
        for variant, other in self._others(bounds):
            if other is None:
                continue
            expected = {name: as_exact(each, other.scales[name]) for name, each in other.arrays.items() if name in got}
            if wrong in expected and bounds.measure(got, expected).passes:
                return variant
        is_narrow = bounds.question.dtype in ("float16", "bfloat16")
        error = bounds.measure(got, bounds.truth.arrays).error
        return NARROW if is_narrow and error <= 4 * (1 + bounds.truth.kappa) else None


def _mended(each: NumpyArray, where: NumpyArray, expected: Exact) -> NumpyArray:
    return np.where(where, expected.high, each).astype(each.dtype)


def power(question: Question, problem: Problem, bounds: Bounds, variants: Variants) -> dict[str, Any]:
    """The faults that the bounds of this problem reject, and how many apply to it."""
    if not question.power or size_of(problem) > MOST_PLANTED:
        return {}
    rejected, planted = [], []
    for fault in FAULTS:
        other = variants.of(fault)
        if other is None:
            continue
        got = {name: _rounded(each, problem) for name, each in other.arrays.items() if name in bounds.truth.arrays}
        got = {name: each for name, each in got.items() if name not in ("weights", "logsumexp")}
        planted.append(fault.name)
        if not bounds.measure(got, bounds.truth.arrays).passes:
            rejected.append(fault.name)
    return {"rejected": tuple(rejected), "planted": tuple(planted)}


def _rounded(each: NumpyArray, problem: Problem) -> NumpyArray:
    return each.astype(np.float64).astype(problem.arrays["query"].dtype)
