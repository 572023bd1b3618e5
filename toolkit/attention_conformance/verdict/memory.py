"""The memory that a large case takes, before it is run."""

from __future__ import annotations

from attention_conformance.measure.question import Question
from attention_workers.memory import available


def too_large(question: Question, free: float | None) -> str:
    """Why a case cannot run in so much memory, in GiB; empty where it can, or where nothing is known of it."""
    needed = question.case.memory
    if free is None or needed <= free:
        return ""
    return f"{question.case.name} takes {needed:.3g} GiB of memory of which {free:.1f} GiB are free"


def available_memory() -> float | None:
    """The memory that is free, in GiB; None where the system does not tell."""
    size = available()
    return None if size is None else size / 2**30
