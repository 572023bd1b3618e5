"""The memory that a large case takes, before it is run: as stated, or measured on a part of its scores."""

from __future__ import annotations

from dataclasses import replace

from attention_conformance.cases.large import SIDE
from attention_conformance.measure.question import Question
from attention_conformance.verdict.judge import judged
from attention_workers.memory import available, peak_growth

SPARE = 1.0
"""GiB that a measured case may take beyond what was measured."""


def too_large(question: Question, free: float | None) -> str:
    """Why a case cannot run in so much memory, in GiB; empty where it can, or where nothing is known of it."""
    case = question.case
    if free is None or case.memory <= free:
        return ""
    grown = None if case.sample is None else _grown(question)
    needed = case.memory if grown is None else grown * SIDE**2 + SPARE
    if needed <= free:
        return ""
    source = "" if grown is None else f", {SIDE**2} times what {SIDE**-2:.1%} of its scores took"
    return f"it takes {needed:.3g} GiB of memory{source}; {free:.1f} GiB are free"


def _grown(question: Question) -> float | None:
    """The GiB by which the maximum of this process grows in the small problem; None where the system does not tell.

    A first call loads what all calls need, and the second one is measured. Memory of a device does not show here.
    """
    if question.subject.device not in (None, "cpu") or question.case.sample is None:
        return None
    small = replace(question, case=replace(question.case, inputs=question.case.sample))
    judged(small)
    return _in_gib(peak_growth(lambda: judged(small)))


def available_memory() -> float | None:
    """The memory that is free, in GiB; None where the system does not tell."""
    return _in_gib(available())


def _in_gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30
