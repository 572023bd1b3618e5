"""What came of a run as JUnit XML, for build servers."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from attention_conformance.result import Result
from attention_conformance.run.again import command_of
from attention_conformance.run.finding import Finding
from attention_conformance.written.report import reason_of, told, way_of
from attention_conformance.written.story import story
from attention_files.writing import write_file

__all__ = ["write_findings", "write_results"]

SKIPPED = ("not offered", "refused", "not understood")


def write_results(path: Path, results: Sequence[Result]) -> None:
    """Write results as test cases, a suite for every backend."""
    suites = {result.backend: TestSuite(result.backend) for result in results}
    for result in results:
        suites[result.backend].add_testcase(_case_of_result(result))
    _write(path, "attention-core conformance", suites.values())


def write_findings(path: Path, findings: Sequence[Finding], about: Mapping[str, Any]) -> None:
    """Write findings as test cases of one suite.

    Parameters
    ----------
    path : Path
    findings : sequence of Finding
    about : mapping
        ``target``, ``profile``, ``seed``, ``declared`` and ``versions`` of the run.
    """
    suite = TestSuite(about["target"])
    for name in ("profile", "seed"):
        suite.add_property(name, str(about.get(name, "")))
    for name, each in about.get("versions", {}).items():
        suite.add_property(name, str(each))
    for finding in findings:
        suite.add_testcase(_case_of_finding(finding, about))
    _write(path, "attention-core check", [suite])


def _write(path: Path, name: str, suites: Iterable[TestSuite]) -> None:
    document, written = JUnitXml(name), io.BytesIO()
    for suite in suites:
        document.add_testsuite(suite)
    document.write(written, pretty=True)
    write_file(path, written.getvalue())


def _case_of_result(result: Result) -> TestCase:
    suite = ".".join(filter(None, way_of(result)))
    case = TestCase(f"{result.case} [{told(result)}]", classname=suite, time=round(result.seconds, 4))
    measured = f"error {result.error:.3g}, bound {result.bound:.3g}, measure {result.measure}; {result.detail}"
    if result.passed is False:
        case.result = [Failure(measured, result.measure)]
    elif result.passed is None:
        case.result = [Skipped(reason_of(result) if result.refused else result.detail)]
    return case


def _case_of_finding(finding: Finding, about: Mapping[str, Any]) -> TestCase:
    case = TestCase(f"{finding.case} [{finding.dtype}]", classname=about["target"], time=round(finding.seconds, 4))
    if finding.verdict in SKIPPED:
        case.result = [Skipped(f"{finding.verdict}: {finding.detail}")]
    elif finding.verdict not in ("right", "accepted"):
        kind = Error if finding.verdict in ("crashed", "timed out") else Failure
        failure = kind(f"{finding.verdict}: {finding.detail}", finding.verdict)
        again = command_of(finding, about["target"], about.get("declared", {}), about.get("profile", "kernel"))
        failure.text = "\n".join([*story(finding), again, *([finding.traceback] if finding.traceback else [])])
        case.result = [failure]
    elif finding.reason:
        case.system_out = f"accepted: {finding.reason}"
    return case
