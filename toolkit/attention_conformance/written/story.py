"""A result in words for somebody who has not seen the kit: what is wrong, where, and who else made the mistake."""

from __future__ import annotations

import math

from attention_conformance.bits.cases import VARIATIONS
from attention_conformance.cases.contract import LINES
from attention_conformance.measure.finding import CONVENTION, WRONG, Finding
from attention_conformance.named.related import seen_before


def contract_line(result: Finding) -> str:
    """The line of the contract that a result is about; empty where there is none."""
    return f"Contract, line {result.line}: {LINES[result.line]}" if result.line in LINES and result.line else ""


def story(result: Finding) -> list[str]:
    """The lines that tell of a result: the case, the cause, the line of the contract, the worst element, a thread."""
    cause = f"{result.says} ({result.variant})" if result.variant else result.says
    worst = result.worst
    error = f"{result.error:.3g} units in the last place, bound {result.bound:.3g}" if worst else ""
    if worst and math.isfinite(worst.correlation):
        error += f"; correlation {worst.correlation:.6f}, cosine {worst.cosine:.6f}, which forgive single rows"
    lines = [result.shows, cause, contract_line(result), result.detail, error, result.reason, thread_of(result)]
    return list(filter(None, lines))


def thread_of(result: Finding) -> str:
    """A public thread about the same property, and what it has to do with a result; empty where there is none."""
    is_reported = result.verdict in (*WRONG, CONVENTION, "accepted") and result.case not in VARIATIONS
    seen = seen_before(result.case, result.variant) if is_reported and result.dtype != "-" else []
    for each in seen[:1]:
        relation = "Seen before" if result.case in each.like else f"Also about {each.property}"
        return f"{relation}: {each.thread}, {each.title}; {each.url}"
    return ""
