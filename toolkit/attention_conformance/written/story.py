"""A finding in words for somebody who has not seen the kit: what is wrong, where, and who else made the mistake."""

from __future__ import annotations

import math
import shlex

from attention_conformance.bits.cases import VARIATIONS
from attention_conformance.cases.contract import LINES
from attention_conformance.measure.finding import WRONG, Finding
from attention_conformance.named.case import NamedCase
from attention_conformance.named.related import property_of, seen_before

MOST_THREADS = 2


def contract_line(finding: Finding) -> str:
    """The line of the contract that a finding is about; empty where there is none."""
    return f"Contract, line {finding.line}: {LINES[finding.line]}" if finding.line in LINES and finding.line else ""


def story(finding: Finding) -> list[str]:
    """The lines that tell of a finding: the case, the cause, the line of the contract, the worst element, threads."""
    cause = f"{finding.says} ({finding.variant})" if finding.variant else finding.says
    worst = finding.worst
    error = f"{finding.error:.3g} units in the last place, bound {finding.bound:.3g}" if worst else ""
    if worst and math.isfinite(worst.correlation):
        error += f"; correlation {worst.correlation:.6f}, cosine {worst.cosine:.6f}, which forgive single rows"
    lines = [finding.shows, cause, contract_line(finding), finding.detail, error, finding.reason]
    return [*filter(None, lines), *thread_lines(finding)]


def threads(finding: Finding) -> list[tuple[str, NamedCase]]:
    """Threads about the same property, each with what it has to do with a finding."""
    if (
        finding.dtype == "-"
        or finding.case in VARIATIONS
        or finding.verdict not in (*WRONG, "differs by convention", "accepted")
    ):
        return []
    return [
        ("Seen before" if finding.case in each.like else f"Also about {each.property}", each)
        for each in seen_before(finding.case, finding.variant)
    ]


def thread_lines(finding: Finding) -> list[str]:
    """The first of the threads, a line each; how to list the others."""
    seen = threads(finding)
    lines = [f"{relation}: {each.thread}, {each.title}; {each.url}" for relation, each in seen[:MOST_THREADS]]
    rest = len(seen) - MOST_THREADS
    command = f"attention-core cases --property {shlex.quote(property_of(finding.case, finding.variant))}"
    return lines + ([f"and {rest} more: {command}"] if rest > 0 else [])
