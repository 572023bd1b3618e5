"""Answers to other arrays than those of the call: of a call before, or of memory that is read without its strides."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attention_conformance.cases.case import Case
from attention_conformance.cases.kernels import asking
from attention_conformance.oracle.variants import Variant
from attention_conformance.problem import NumpyArray, Problem
from attention_conformance.strides import MEMORY, stored
from attention_conformance.subjects.call import axes_of
from attention_conformance.subjects.subject import Subject

ARRAYS = ("query", "key", "value", "mask", "bias")

CALL = Variant("former-call", 10, "it is the answer to the call before")
LATE = "the {} is that of the call before, as a cache by shape keeps it"
OF_ARRAY = {name: Variant(f"former-{name}", 10, LATE.format(name)) for name in ARRAYS}
STRIDES = Variant("strides-ignored", 10, "arrays are read as if they were contiguous")
FLAT = "the {} is read as if it were contiguous"
OF_STRIDES = {name: Variant(f"strides-of-{name}-ignored", 10, FLAT.format(name)) for name in ARRAYS}
MEMORY_OF = Variant("former-memory", 10, "an equal call again gives another answer, as where former memory is used")

FORMER = (MEMORY_OF, CALL, *OF_ARRAY.values(), STRIDES, *OF_STRIDES.values())
"""All that `mistaken` may tell."""

OWN = {"overwritten", "again"}
"""Measures whose other call has the samples in the other order."""


def mistaken(case: Case, problem: Problem, subject: Subject, seed: int) -> Iterator[tuple[Variant, Problem]]:
    """Problems with arrays of the call before, or as another reading of memory has them, and what that is called."""
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
    read = {
        name: _contiguous(problem, name, subject)
        for name, kind in problem.memory.items()
        if name in problem.arrays and kind in MEMORY
    }
    if read:
        yield STRIDES, problem.changed(arrays={**problem.arrays, **read})
    for name, each in read.items():
        yield OF_STRIDES[name], problem.changed(arrays={**problem.arrays, name: each})


def _shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    return {name: each.shape for name, each in problem.arrays.items()}


def _contiguous(problem: Problem, name: str, subject: Subject) -> NumpyArray:
    """What stands from the first element on, in the order of the subject's axes; NaN behind the end."""
    array = problem.arrays[name]
    axes = axes_of(subject.layout or "BHSD") if name in ("query", "key", "value") and array.ndim == 4 else None
    storage, view = stored(array, problem.memory[name], axes)
    seen = view(storage, np)
    start = (seen.__array_interface__["data"][0] - storage.__array_interface__["data"][0]) // storage.itemsize
    flat = storage.ravel()[start : start + array.size]
    filler = True if array.dtype == bool else np.nan
    flat = np.concatenate([flat, np.full(array.size - flat.size, filler, array.dtype)])
    if axes is None:
        return np.asarray(flat.reshape(array.shape))
    shape = tuple(array.shape[axis] for axis in axes)
    return np.asarray(flat.reshape(shape).transpose(np.argsort(axes)))
