"""What was found about a subject: text for people, JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from attention_conformance.cases.contract import LINES
from attention_conformance.oracle.variants import FAULTS
from attention_conformance.run.finding import WRONG, Finding, counted, finding_from, to_row
from attention_numpy.writing import write_file

__all__ = ["assumptions", "line_of", "power", "read_findings", "summary", "tables", "write_findings"]

STYLES = {
    "silently wrong": "bold red",
    "visibly wrong": "red",
    "crashed": "bold magenta",
    "timed out": "bold magenta",
    "differs by convention": "yellow",
    "refused": "dim",
    "not offered": "dim",
    "accepted": "cyan",
    "right": "green",
}

WORDS = {
    "keep": "True = may attend",
    "drop": "True = hidden",
    "additive": "0 and -inf, added",
    "sqrt": "1/√D",
    "one": "1",
}
HIDDEN = ("name", "native", "asks", "order", "array_names", "returns", "options", "keeps_dtype")


def assumptions(facts: Mapping[str, Any], declared: Iterable[str]) -> list[str]:
    """A line for each fact about a subject, with how it is known."""
    if facts.get("native"):
        return ["the signature of attention_core.scaled_dot_product_attention"]
    lines = []
    for name, fact in facts.items():
        if name in HIDDEN or (name.endswith("_name") and not fact):
            continue
        told = ", ".join(fact) if isinstance(fact, tuple) else WORDS.get(str(fact), str(fact))
        told = {"True": "yes", "False": "no"}.get(told, told)
        known = "declared" if name in declared else "found by a call"
        lines.append(f"{name.replace('_', ' ')}: {told} ({known})")
    return lines


def line_of(finding: Finding) -> Text:
    """A finding in a line or two."""
    text = Text(f"{finding.verdict}: ", style=STYLES[finding.verdict])
    text.append(f"{finding.case} {finding.dtype}", style="bold")
    text.append(f": {finding.detail}", style="default")
    return text


def tables(findings: Sequence[Finding], width: int) -> Iterable[Table | Text]:
    """What is wrong, the worst first and grouped by cause; then the numbers of all verdicts."""
    shown = [*WRONG, "crashed", "timed out", "differs by convention", "accepted"]
    for verdict in shown:
        groups: dict[tuple[str, int], list[Finding]] = {}
        for each in findings:
            if each.verdict == verdict:
                groups.setdefault((each.variant or each.case, each.line), []).append(each)
        if not groups:
            continue
        yield Text(f"\n{verdict.upper()}", style=STYLES[verdict])
        for group in groups.values():
            yield from _group(group, width)
    refused = Counter(each.detail[: width - 12] for each in findings if each.verdict == "refused")
    if refused:
        yield Text("\nREFUSED", style="bold")
        yield from (Text(f"  {count:>3} × {reason}", style="dim") for reason, count in refused.most_common(6))
    lacking = Counter(each.detail for each in findings if each.verdict == "not offered")
    if lacking:
        yield Text("\nNOT OFFERED", style="bold")
        yield from (Text(f"  {count:>3} × {reason}", style="dim") for reason, count in lacking.most_common())
    yield Text("")
    yield _counts(findings)


def _group(group: Sequence[Finding], width: int) -> Iterable[Text]:
    first = group[0]
    cause = first.says if first.variant else first.shows.rstrip(".")
    name = f" ({first.variant})" if first.variant else ""
    yield Text(f"  {cause}{name}", style="bold")
    if first.line in LINES and first.line:
        yield Text(f"    contract, line {first.line}: {LINES[first.line]}", style="dim")
    names = ", ".join(dict.fromkeys(f"{each.case} [{each.dtype}]" for each in group))
    yield Text(f"    {names}" if len(names) < 3 * width else f"    {names[: 3 * width]}… ({len(group)} in all)")
    yield Text(f"    {first.case}: {first.detail}")


def _counts(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1))
    table.add_column("verdict")
    table.add_column("cases", justify="right")
    table.add_column("means")
    for verdict, count in counted(findings).items():
        table.add_row(Text(verdict, style=STYLES[verdict]), str(count), MEANINGS[verdict])
    return table


MEANINGS = {
    "silently wrong": "finite numbers that are not the answer",
    "visibly wrong": "NaN for a number, or a wrong shape or dtype",
    "crashed": "the process ended",
    "timed out": "no answer in time",
    "differs by convention": "another known answer; --accept NAME",
    "refused": "an exception before a result",
    "not offered": "the subject declares no such option",
    "accepted": "named by --accept",
    "right": "within the bound",
}


def power(findings: Sequence[Finding], profile: str) -> list[str]:
    """How many planted faults the bounds reject, which they miss, and which cases reject none."""
    rejected = {fault for each in findings for fault in each.rejected}
    names = [fault.name for fault in FAULTS if any(fault.name in each.planted for each in findings)]
    if not names:
        return []
    lines = [
        f"The bounds of profile {profile} reject {len(rejected)} of {len(names)} faults planted in the definition."
    ]
    missed = [name for name in names if name not in rejected]
    if missed:
        lines.append(f"No case that is right would show: {', '.join(missed)}.")
    idle = dict.fromkeys(each.case for each in findings if each.is_idle)
    if idle:
        lines.append(f"Idle, as they reject none: {', '.join(idle)}.")
    return lines


def summary(findings: Sequence[Finding]) -> str:
    """All verdicts with their numbers, the worst first."""
    counts = counted(findings)
    leading = [] if "silently wrong" in counts else ["0 silently wrong"]
    return ", ".join([*leading, *(f"{count} {verdict}" for verdict, count in counts.items())])


def write_findings(path: Path, findings: Sequence[Finding], about: Mapping[str, Any]) -> None:
    """Write what a run found, also one that was interrupted, so that another can go on from it."""
    document = {"about": about, "summary": counted(findings), "findings": [to_row(each) for each in findings]}
    write_file(path, (json.dumps(document, indent=1, allow_nan=False, default=str) + "\n").encode())


def read_findings(path: Path) -> list[Finding]:
    """The findings of a former run."""
    document = json.loads(path.read_text())
    return [finding_from(row) for row in document["findings"]]
