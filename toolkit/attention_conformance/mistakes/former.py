"""Answers to other arrays than those of the call: of a call before."""

from __future__ import annotations

from collections.abc import Iterator

from attention_conformance.cases.case import Case
from attention_conformance.cases.kernels import asking
from attention_conformance.mistakes.variants import Variant, cause
from attention_conformance.problem import Problem

ARRAYS = ("query", "key", "value", "mask", "bias")

CALL = cause("former-call")
OF_ARRAY = {name: cause(f"former-{name}") for name in ARRAYS}
STRIDES = cause("strides-ignored")
MEMORY_OF = cause("former-memory")

OWN = {"overwritten", "again"}
"""Measures whose other call has the samples in the other order."""


def mistaken(case: Case, problem: Problem, seed: int) -> Iterator[tuple[Variant, Problem]]:
    """Problems with arrays of the call before, and what that is called."""
    former = asking(case, problem, seed)
    if case.measure in OWN:
        former = [problem.turned()]
    for earlier in former:
        if _shapes(earlier) != _shapes(problem):
            continue
        yield CALL, problem.changed(arrays=earlier.arrays, options=earlier.options, mask=earlier.mask)
        for name in OF_ARRAY:
            if name in problem.arrays:
                yield OF_ARRAY[name], problem.changed(arrays={**problem.arrays, name: earlier.arrays[name]})


def _shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    return {name: each.shape for name, each in problem.arrays.items()}
