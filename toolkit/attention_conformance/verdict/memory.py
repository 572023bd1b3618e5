"""The memory that a large case takes, before it is run."""

from __future__ import annotations

from attention_conformance.measure.question import Question
from attention_workers.memory import available


def too_large(question: Question) -> str:
    """Why a case cannot run in the memory that is free; empty where it can, or where nothing is known of it."""
    needed = question.case.memory  # in GiB
    free = available() if needed else None
    if free is None or needed <= free / 2**30:
        return ""
    return f"{question.case.name} takes {needed:.3g} GiB of memory of which {free / 2**30:.1f} GiB are free"
