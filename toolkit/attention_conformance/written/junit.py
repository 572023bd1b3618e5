"""What came of a run as JUnit XML, for build servers."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from attention_conformance.run.again import command_of
from attention_conformance.run.finding import ENDED, Finding
from attention_conformance.written.report import told, way_of
from attention_conformance.written.story import story
from attention_files.writing import write_file

SKIPPED = ("not offered", "refused", "not understood")


def write_junit(path: Path, findings: Sequence[Finding], about: Mapping[str, Any]) -> None:
    """Write findings as test cases: a suite for each backend of the core, and one for any other subject."""
    document, written, suites = JUnitXml("attention-core"), io.BytesIO(), dict[str, TestSuite]()
    for finding in findings:
        name = finding.backend or about["target"]
        if name not in suites:
            suites[name] = TestSuite(name)
        suites[name].add_testcase(_case(finding, about))
    for suite in suites.values():
        for name in ("profile", "seed"):
            suite.add_property(name, str(about.get(name, "")))
        for name, each in about.get("versions", {}).items():
            suite.add_property(name, str(each))
        document.add_testsuite(suite)
    document.write(written, pretty=True)
    write_file(path, written.getvalue())


def _case(finding: Finding, about: Mapping[str, Any]) -> TestCase:
    named = ".".join(filter(None, way_of(finding))) or about["target"]
    case = TestCase(f"{finding.case} [{told(finding)}]", classname=named, time=round(finding.seconds, 4))
    if finding.verdict in SKIPPED or (finding.verdict == "accepted" and finding.reason):
        case.result = [Skipped(f"{finding.verdict}: {finding.reason or finding.detail}")]
    elif not finding.passed and finding.verdict != "accepted":
        kind = Error if finding.verdict in ENDED else Failure
        failure = kind(f"{finding.verdict}: {finding.detail}", finding.verdict)
        again = command_of(finding, about["target"], about.get("declared", {}), about.get("profile", "kernel"))
        failure.text = "\n".join([*story(finding), again, *([finding.traceback] if finding.traceback else [])])
        case.result = [failure]
    return case
