"""What came of a run as JUnit XML, for build servers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from junitparser import Failure, JUnitXml, Skipped, TestCase, TestSuite

from attention_conformance.report import reason_of, told, way_of
from attention_conformance.run.result import Result
from attention_files.writing import write_file

__all__ = ["write_junit"]


def write_junit(path: Path, results: Sequence[Result]) -> None:
    """Write results as test cases, a suite for every backend."""
    document = JUnitXml("attention-core conformance")
    for backend in dict.fromkeys(result.backend for result in results):
        suite = TestSuite(backend)
        for result in results:
            if result.backend == backend:
                suite.add_testcase(_test_case(result))
        document.add_testsuite(suite)
    written = io.BytesIO()
    document.write(written, pretty=True)
    write_file(path, written.getvalue())


def _test_case(result: Result) -> TestCase:
    suite = ".".join(filter(None, way_of(result)))
    case = TestCase(f"{result.case} [{told(result)}]", classname=suite, time=round(result.seconds, 4))
    measured = f"error {result.error:.3g}, bound {result.bound:.3g}, measure {result.measure}; {result.detail}"
    if result.passed is False:
        case.result = [Failure(measured, result.measure)]
    elif result.passed is None:
        case.result = [Skipped(reason_of(result) if result.refused else result.detail)]
    return case
