"""What came of a run: a table for people, JSON and JUnit XML for programs."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from junitparser import Failure, JUnitXml, Skipped, TestCase, TestSuite
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attention_conformance.model import PAIRS
from attention_conformance.problem import NumpyArray
from attention_conformance.runner import Result
from attention_core import Backend

__all__ = ["cosine_table", "environment", "failures", "result_table", "summary", "write_json", "write_junit"]

LEGEND = (
    "Cells: the worst error over devices and dtypes, in units in the last place of S, the sum of p |v|; for exact and "
    "message cases, what differs. !: beyond its bound. *: beyond it for a reason that is known. -: not run."
)


def result_table(results: Sequence[Result]) -> RenderableType:
    """A row for every case, a column for every backend and mode."""
    ways = list(dict.fromkeys((result.backend, result.mode) for result in results))
    table = Table(title="Conformance", title_justify="left", header_style="bold")
    table.add_column("case")
    for backend, mode in ways:
        table.add_column(f"{backend}\n{mode}", justify="right")
    for case in dict.fromkeys(result.case for result in results):
        of_case = [result for result in results if result.case == case]
        table.add_row(case, *(_cell([r for r in of_case if (r.backend, r.mode) == way]) for way in ways))
    return Group(table, Text(LEGEND, style="dim"))


def _cell(results: Sequence[Result]) -> Text:
    failed = [result for result in results if result.passed is False]
    exempt = [result for result in results if result.passed is None and not math.isnan(result.error)]
    passed = [result for result in results if result.passed]
    for group, mark, style in ((failed, "!", "bold red"), (passed, "", "green"), (exempt, "*", "yellow")):
        if group:
            marked = "*" if exempt and not failed else mark
            return Text(f"{max(result.error for result in group):.3g}{marked}", style=style)
    return Text("-", style="dim")


def cosine_table(cosines: Mapping[tuple[str, str], NumpyArray]) -> Table:
    """The cosines between the sentences of each pair, for every backend and mode."""
    table = Table(title="Cosines of sentences, float32", title_justify="left", header_style="bold")
    table.add_column("sentences")
    for backend, mode in cosines:
        table.add_column(f"{backend}\n{mode}", justify="right")
    for row, pair in enumerate(PAIRS):
        table.add_row("\n".join(pair), *(f"{each[row]:.6f}" for each in cosines.values()))
    return table


def failures(results: Iterable[Result]) -> list[str]:
    """A line for every result that failed."""
    return [
        f"{result.case} on {result.backend} ({result.device}, {result.dtype}, {result.mode}): "
        f"error {result.error:.3g}, bound {result.bound:.3g}; {result.detail}"
        for result in results
        if result.passed is False
    ]


def summary(results: Sequence[Result]) -> str:
    """How many passed, failed, and were not run or are exempt."""
    counts = {outcome: sum(result.passed is outcome for result in results) for outcome in (True, False, None)}
    skipped = f", {counts[None]} skipped" if counts[None] else ""
    return f"{counts[True]} passed, {counts[False]} failed{skipped}"


def environment(backends: Iterable[Backend]) -> dict[str, Any]:
    """Where and when a run took place."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "attention-core": version("attention-core"),
        "backends": {backend.name: backend.versions() for backend in backends},
    }


def write_json(path: Path, results: Sequence[Result], about: Mapping[str, Any]) -> None:
    """Write environment and results; numbers that JSON does not know, infinity and nan, become text and null."""
    rows = [
        {name: _number(each) if isinstance(each, float) else each for name, each in dataclasses.asdict(result).items()}
        for result in results
    ]
    outcomes = {"passed": True, "failed": False, "skipped": None}
    counts = {name: sum(result.passed is outcome for result in results) for name, outcome in outcomes.items()}
    document = {"environment": about, "summary": counts, "results": rows}
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _number(number: float) -> float | str | None:
    if math.isnan(number):
        return None
    return number if math.isfinite(number) else "inf"


def write_junit(path: Path, results: Sequence[Result]) -> None:
    """Write results as test cases, a suite for every backend."""
    document = JUnitXml("attention-core conformance")
    for backend in dict.fromkeys(result.backend for result in results):
        suite = TestSuite(backend)
        for result in results:
            if result.backend == backend:
                suite.add_testcase(_test_case(result))
        document.add_testsuite(suite)
    document.write(str(path), pretty=True)


def _test_case(result: Result) -> TestCase:
    way = f"{result.device}, {result.dtype}, {result.mode}"
    case = TestCase(
        f"{result.case} [{way}]", classname=f"{result.backend}.{result.mode}", time=round(result.seconds, 4)
    )
    measured = f"error {result.error:.3g}, bound {result.bound:.3g}, measure {result.measure}; {result.detail}"
    if result.passed is False:
        case.result = [Failure(measured, result.measure)]
    elif result.passed is None:
        case.result = [Skipped(result.detail)]
    return case
