"""What was found about a subject as JUnit XML, for build servers."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from attention_conformance.run.again import command_of
from attention_conformance.run.finding import Finding
from attention_conformance.written.story import story
from attention_files.writing import write_file

__all__ = ["write_junit"]

SKIPPED = ("not offered", "refused", "not understood")


def write_junit(path: Path, findings: Sequence[Finding], about: Mapping[str, Any]) -> None:
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
        suite.add_testcase(_test_case(finding, about))
    document = JUnitXml("attention-core check")
    document.add_testsuite(suite)
    written = io.BytesIO()
    document.write(written, pretty=True)
    write_file(path, written.getvalue())


def _test_case(finding: Finding, about: Mapping[str, Any]) -> TestCase:
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
