"""A finding in words for somebody who has not seen the kit: what is wrong, where, and who else made the mistake."""

from __future__ import annotations

from attention_conformance.cases.contract import LINES
from attention_conformance.named.related import related
from attention_conformance.run.finding import Finding

__all__ = ["line_told", "story"]

MOST_THREADS = 2


def line_told(finding: Finding) -> str:
    """The line of the contract that a finding is about; empty where there is none."""
    return f"Contract, line {finding.line}: {LINES[finding.line]}" if finding.line in LINES and finding.line else ""


def story(finding: Finding) -> list[str]:
    """The lines that tell of a finding: the case, the cause, the line of the contract, the worst element, threads."""
    cause = f"{finding.says} ({finding.variant})" if finding.variant else ""
    error = f"{finding.error:.3g} units in the last place, bound {finding.bound:.3g}" if finding.worst else ""
    lines = [finding.shows, cause, line_told(finding), finding.detail, error, finding.reason]
    seen = related(finding.case)
    lines += [f"Seen before: {each.thread}, {each.title}; {each.url}" for each in seen[:MOST_THREADS]]
    rest = len(seen) - MOST_THREADS
    lines += [f"and {rest} more: attention-core cases --like {finding.case}"] if rest > 0 else []
    return [each for each in lines if each]
