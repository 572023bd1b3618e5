"""What came of a run of the core: the lines of its contract, and what is beyond a bound."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from rich.table import Table
from rich.text import Text

from attention_conformance.cases import CASES
from attention_conformance.cases.contract import LINES
from attention_conformance.measure.finding import Finding

LINE_LEGEND = (
    "The worst error is the one that comes nearest to its bound, in units in the last place of S, the sum of p |v|; "
    "where it is, --json writes whole."
)


def line_table(results: Iterable[Finding], width: int) -> Table:
    """A row for every line of the contract, and one for numerical hazards: the worst error, where, and of how many."""
    table = Table(
        title="The contract, line by line", title_justify="left", header_style="bold", box=None, padding=(0, 1)
    )
    left = max(width - 41, 20)  # what numbers and the space between columns leave for texts
    says = min(left * 3 // 5, max(map(len, LINES.values())))
    for heading, most in (("line", 4), ("says", says), ("worst error", 13), ("passed", 12), ("where", left - says)):
        justify: Literal["left", "right"] = "left" if heading in ("says", "where") else "right"
        table.add_column(heading, width=most, justify=justify, no_wrap=True, overflow="ellipsis")
    lines = {case.name: case.line for case in CASES}
    judged: dict[int, list[Finding]] = {line: [] for line in LINES}
    for result in results:
        if result.passed is not None and result.case in lines:
            judged[lines[result.case]].append(result)
    for line, group in judged.items():
        if group:
            worst = max(group, key=_nearness)
            passed = sum(bool(result.passed) for result in group)
            count, style = f"{passed} of {len(group)}", "green" if passed == len(group) else "bold red"
            error = f"{worst.error:.3g} of {worst.bound:.3g}" if worst.bound > 0 else f"{worst.error:.3g}"
            where = f"{worst.case} {worst.backend} {way_text(worst)}"
            table.add_row(str(line or "-"), LINES[line], error, Text(count, style=style), where)
    return table


def _nearness(result: Finding) -> tuple[bool, float, float]:
    """The error of a result in comparison: as a part of its bound, and one that fails before all others."""
    ratio = result.error / result.bound if result.bound > 0 else result.error
    return result.passed is False, math.inf if math.isnan(ratio) else ratio, result.error


def failures(results: Iterable[Finding]) -> list[str]:
    """A line for every result that failed."""
    return [
        f"{result.case} on {result.backend} ({way_text(result)}): "
        f"error {result.error:.3g}, bound {result.bound:.3g}; {'; '.join(filter(None, (result.detail, result.says)))}"
        for result in results
        if result.passed is False
    ]


def way_text(result: Finding) -> str:
    """In which way a result was come by, but for the backend."""
    return ", ".join(filter(None, (result.device, result.dtype, result.mode, result.implementation)))
