"""Batch invariance: a sample alone, elsewhere in a batch, among others, and in a larger batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from attention_conformance.cases.case import Draw, case
from attention_conformance.oracle.ulps import difference
from attention_conformance.problem import NumpyArray, Problem, Rule

CALLS = ((0, 1, 2), (2, 0, 1), (0,), (1,), (2,), (3, 2, 4, 0, 5, 1))
"""The samples of each call: a batch, in other places, each alone, and among others, which are 3 and more."""

STARTS = tuple(itertools.accumulate(map(len, CALLS), initial=0))
"""The first sample of each call, and the end."""

LENGTHS = (4, 7, 1, 2, 6, 3)
"""Key lengths, of which the neighbours have others."""

SCORES = 1.5
"""By how much queries and keys of neighbours are larger. Values are larger by more than slices of float32 hold."""


def crowded(draw: Draw, **options: Any) -> Problem:
    """Samples of lengths of their own in six calls, whose last has neighbours of other lengths and larger values."""
    samples = len(LENGTHS)
    rule = Rule("KeyLengths", {"lengths": "lengths"})
    value = draw.normal(samples, 2, 7, draw.value_width, mean=2.0, deviation=0.5)  # padding is as large as the rest
    problem = draw.problem(rule, {"value": value}, leading=(samples,), heads=4, groups=2, **options)
    larger = {"query": SCORES, "key": SCORES, "value": 2.0**10 if draw.dtype == "float16" else 2.0**40}
    arrays: dict[str, NumpyArray] = {"lengths": np.asarray(LENGTHS, np.int32)}
    for name, factor in larger.items():
        arrays[name] = problem.arrays[name].copy()
        arrays[name][3:] *= arrays[name].dtype.type(factor)
    order = [sample for samples in CALLS for sample in samples]
    return problem.changed(arrays={name: each[order] for name, each in arrays.items()})


def in_calls(problem: Problem) -> Iterator[Problem]:
    """The problem of each call, contiguous, as calls of their own have them."""
    for start, stop in itertools.pairwise(STARTS):
        yield problem.changed(arrays={n: np.ascontiguousarray(each[start:stop]) for n, each in problem.arrays.items()})


def other_bits(problem: Problem, got: Mapping[str, NumpyArray]) -> str:
    """Tell where equal samples of several calls have unlike bits; empty where none has."""
    first: dict[bytes, int] = {}
    for sample in range(STARTS[-1]):
        known = b"".join(each[sample].tobytes() for each in problem.arrays.values())
        twin = first.setdefault(known, sample)
        for name, array in got.items():
            if unlike := difference(array[twin], array[sample]):
                calls = np.searchsorted(STARTS, (twin, sample), "right") - 1
                batches = " and one of ".join(str(len(CALLS[call])) for call in calls)
                return f"a sample differs between a batch of {batches}: {unlike.text(name)}"
    return ""


BATCH = (
    case("batch-invariance", crowded, measure="batch"),
    case("batch-invariance-bits", lambda d: crowded(d, arithmetic="reproducible"), measure="batch bits",
         dtypes=("float16", "bfloat16", "float32")),
)  # fmt: skip
"""The property, within bounds and in bits."""
