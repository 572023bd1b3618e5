"""What a job asks of a kernel, or of two: a case in a type each."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from attention_conformance.bits.cases import BITS, SAME_CALL
from attention_conformance.cases.case import Case
from attention_conformance.cases.shapes import shape_of
from attention_conformance.launch.subject import Subject
from attention_conformance.measure.catalogue import OF_OTHERS, kernel_cases, matching
from attention_conformance.measure.question import Question
from attention_conformance.problem import DTYPES, NARROW
from attention_conformance.run.job import Job

SLOW = ("bits-compiled", "bits-strides", "bits-threads")
"""Questions about bits in one type."""


def questions(kernel: Subject, job: Job) -> list[Question]:
    """What a job asks of a settled kernel."""
    dtypes = job.dtypes or usual_dtypes(kernel)
    is_all = not (job.dtypes or job.cases)
    others = [each for each in DTYPES if each in (kernel.dtypes or ()) and each not in dtypes and is_all]
    asked = functools.partial(Question, profile=job.profile, seed=job.seed, is_trusted=job.is_trusted)
    return [
        asked(
            kernel, case, dtype, digits=not is_shape,
            power=job.power and not case.memory and not (is_shape and case.dtypes is not DTYPES),
        )
        for case in kernel_cases(job.cases, job.profile, kernel, job.seed)
        for is_shape in [shape_of(case.name) is not None]
        for dtype in _asked_types(case, is_shape, dtypes, others)
    ]  # fmt: skip


def _asked_types(case: Case, is_shape: bool, dtypes: Sequence[str], others: Sequence[str]) -> list[str]:
    """The dtypes of a case: a drawn shape has the first of all where none is of its size."""
    asked = [each for each in (*dtypes, *(others if case.name in OF_OTHERS else ())) if each in case.dtypes]
    return asked or list(dtypes[:1]) * is_shape


def pair_questions(kernel: Subject, other: Subject, job: Job) -> list[Question]:
    """What a job asks of two settled kernels; of one and itself, no call is asked twice."""
    both = [each for each in usual_dtypes(kernel) if each in (other.dtypes or ("float32",))]
    return [
        Question(kernel, case, dtype, job.profile, job.seed, power=False, digits=False,
                 other=other)
        for case in matching(BITS, job.cases)
        if not (kernel is other and case.name in SAME_CALL)
        for dtype in job.dtypes or (both[:1] if case.name in SLOW else both)
    ]  # fmt: skip


def usual_dtypes(kernel: Subject) -> tuple[str, ...]:
    """float32, and the type of 16 bits that is usual in the library."""
    taken = kernel.dtypes or ("float32",)
    narrow = NARROW if kernel.backend == "numpy" else NARROW[::-1]
    usual = ["float32", *[each for each in narrow if each in taken][:1]]
    return tuple(each for each in usual if each in taken) or taken[:1]
