"""A finding in words for somebody who has not seen the kit: what is wrong, where, and who else made the mistake."""

from __future__ import annotations

import math

from attention_conformance.bits.cases import VARIATIONS
from attention_conformance.cases.contract import LINES
from attention_conformance.measure.finding import CONVENTION, WRONG, Finding
from attention_conformance.named.related import seen_before


def contract_line(finding: Finding) -> str:
    """The line of the contract that a finding is about; empty where there is none."""
    return f"Contract, line {finding.line}: {LINES[finding.line]}" if finding.line in LINES and finding.line else ""


def story(finding: Finding) -> list[str]:
    """The lines that tell of a finding: the case, the cause, the line of the contract, the worst element, a thread."""
    cause = f"{finding.says} ({finding.variant})" if finding.variant else finding.says
    worst = finding.worst
    error = f"{finding.error:.3g} units in the last place, bound {finding.bound:.3g}" if worst else ""
    if worst and math.isfinite(worst.correlation):
        error += f"; correlation {worst.correlation:.6f}, cosine {worst.cosine:.6f}, which forgive single rows"
    lines = [finding.shows, cause, contract_line(finding), finding.detail, error, finding.reason, thread_of(finding)]
    return list(filter(None, lines))


def thread_of(finding: Finding) -> str:
    """A public thread about the same property, and what it has to do with a finding; empty where there is none."""
    is_told = finding.verdict in (*WRONG, CONVENTION, "accepted") and finding.case not in VARIATIONS
    seen = seen_before(finding.case, finding.variant) if is_told and finding.dtype != "-" else []
    for each in seen[:1]:
        relation = "Seen before" if finding.case in each.like else f"Also about {each.property}"
        return f"{relation}: {each.thread}, {each.title}; {each.url}"
    return ""
