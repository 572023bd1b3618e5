"""A wrong finding about a preset as a script of its own."""

from __future__ import annotations

from attention_conformance.run.catalogue import SUBJECT_CASES
from attention_conformance.run.finding import Finding
from attention_conformance.run.measures import drawn, variables
from attention_conformance.run.question import Question
from attention_conformance.run.script import script
from attention_conformance.subjects.fit import fit
from attention_conformance.subjects.subject import Subject

__all__ = ["MOST", "is_plain", "reproducer"]

MOST = 4_000_000
"""Bytes of arrays that a script holds at most."""


def is_plain(finding: Finding) -> bool:
    """Whether the finding is about the output or the gradients of a single call."""
    if finding.detail.startswith(("logsumexp", "weights")):
        return False
    cases = [each for each in SUBJECT_CASES if each.name == finding.case]
    return any(each.measure in ("ulp", "gradient") and not each.before for each in cases)


def reproducer(finding: Finding, subject: Subject, target: str) -> str | None:
    """The script, which exits with 1 where the result is wrong; None where its arrays are too large."""
    (case,) = (each for each in SUBJECT_CASES if each.name == finding.case)
    question = Question(subject, case, finding.dtype, seed=finding.seed)
    problem = fit(drawn(question), subject)
    names = ("query", "key", "value")
    if problem.cotangent is not None and (subject.backward or not set(variables(question, problem)) <= set(names)):
        return None
    if sum(each.nbytes for each in problem.arrays.values()) > MOST:
        return None
    says = f"{target}, {finding.case} in {finding.dtype}. {finding.shows}"
    return script(problem, subject, target, dtype=finding.dtype, bound=finding.bound, says=says)
