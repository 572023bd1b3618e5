"""Wrong cases once more by the programs that are printed, each in a process of its own, before they are reported."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from attention_conformance.measure.finding import WRONG, Finding, grouped
from attention_conformance.mistakes.variants import TABLES, Variant, cause
from attention_conformance.run.again import script_of

if TYPE_CHECKING:
    from attention_conformance.run.job import Job

UNSURE = {"", "other-bits", *TABLES["former"], *TABLES["experiments"]}
"""Causes that are reported of an answer that other calls may have changed."""

STATE, THREADS = cause("state"), cause("threads")

CAUSES = 3
"""Causes of which a case is run once more: each takes a second."""

SECONDS = 120.0


def confirmed(results: Sequence[Finding], job: Job) -> list[Finding]:
    """The results, but for what is right alone: it is reported as of state, or of threads, with the call before it.

    A case of each of the first causes is run by its program. The others are reported as these where these agree.
    """
    wrong = [each for each in results if each.verdict in WRONG and each.dtype != "-"]
    causes = {id(group[0]): _cause(group[0], job) for group in grouped(wrong)[:CAUSES]}
    reasons = [each for each in causes.values() if each is not None]
    if not reasons:
        return list(results)
    first = THREADS if THREADS in reasons else reasons[0]
    others = first if len(reasons) == len(causes) else None

    def with_cause(number: int, result: Finding) -> Finding:
        reason = causes.get(id(result), others if result.variant in UNSURE else None)
        if result.verdict not in WRONG or reason is None:
            return result
        before = f"; before it came {results[number - 1].case}" if number else ""
        detail = result.detail + before * (reason is STATE)
        return replace(result, variant=reason.name, says=reason.says, line=reason.line, detail=detail)

    return [with_cause(number, each) for number, each in enumerate(results)]


def _cause(result: Finding, job: Job) -> Variant | None:
    """Why a wrong case is right alone; None where it is not."""
    text = script_of(result, job.target, job.declared, job.how)
    if _is_right(text):
        return STATE
    return THREADS if result.variant in UNSURE and _is_right(text, OMP_NUM_THREADS="1") else None


def _is_right(text: str, **environment: str) -> bool:
    """Whether a program of one case says so."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        words, around = [sys.executable, "-c", text], {**os.environ, **environment}
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False, env=around)
        return done.stdout.startswith("right ")
    return False
