"""What was found about a subject as one page of HTML, which needs no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attention_conformance.measure.finding import QUIET, VERDICTS, Finding, counted
from attention_conformance.run.again import command_of, script_of
from attention_conformance.templates import rendered
from attention_conformance.written.story import MOST_THREADS, contract_line, threads
from attention_conformance.written.summary import MEANINGS, assumptions, power, summary
from attention_files.writing import write_file

LEVELS = (
    "within the bound",
    "up to 10 × the bound",
    "up to 100 ×",
    "up to 1,000 ×",
    "up to 10,000 ×",
    "more",
    "not finite",
)
"""What the shades of a map mean."""


def write_html(path: Path, findings: Sequence[Finding], about: Mapping[str, Any]) -> None:
    """Write findings as one page that works from a file.

    Parameters
    ----------
    path : Path
    findings : sequence of Finding
    about : mapping
        ``target``, ``profile``, ``seed``, ``declared``, ``assumed`` and ``versions`` of the run, and its ``machine``.
    """
    write_file(path, html(findings, about).encode())


def html(findings: Sequence[Finding], about: Mapping[str, Any]) -> str:
    """The text of `write_html`."""
    return rendered(
        "page.html",
        about=about,
        title=f"{about['target']}: {summary(findings)}",
        counts=[(verdict, count, MEANINGS[verdict]) for verdict, count in counted(findings).items()],
        rows=[_row(each, about) for each in sorted(findings, key=lambda each: VERDICTS.index(each.verdict))],
        assumed=assumptions(about.get("assumed", {}), about.get("sources", {})),
        power=power(findings, about.get("profile", "kernel")),
        quiet=QUIET,
        levels=LEVELS,
    )


def _row(finding: Finding, about: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a finding."""
    row: dict[str, Any] = {"finding": finding, "line": contract_line(finding), "threads": [], "map": None}
    row |= {"error": _number(finding.error), "bound": _number(finding.bound), "command": "", "script": ""}
    if finding.verdict in ("right", "not offered") or finding.dtype == "-":
        return row
    again = (finding, about["target"], about.get("declared", {}), about.get("profile", "kernel"))
    row |= {"command": command_of(*again), "script": script_of(*again), "threads": threads(finding)[:MOST_THREADS]}
    return row | {"map": _map(finding)}


def _number(number: float) -> str:
    return "" if math.isnan(number) else "∞" if math.isinf(number) else f"{number:.3g}"


def _map(finding: Finding) -> dict[str, Any] | None:
    """The map of errors, a digit for each block."""
    blocks = finding.blocks
    if blocks is None:
        return None
    lines = "/".join("".join(str(level(each, finding.bound)) for each in row) for row in blocks.errors)
    return {"blocks": blocks, "lines": lines}


def level(error: float, bound: float) -> int:
    """The shade of an error, out of `LEVELS`."""
    if not math.isfinite(error):
        return len(LEVELS) - 1
    if error <= bound:
        return 0
    return min(len(LEVELS) - 2, math.ceil(math.log10(error / bound))) if bound > 0 else len(LEVELS) - 2
