"""Tests for pytest, one for each case that a kernel can be asked."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from attention_conformance.kernel.options import Options
from attention_conformance.kernel.target import load_target
from attention_conformance.launch.subject import NotOffered, Subject
from attention_conformance.measure.finding import Finding, accept
from attention_conformance.measure.question import Question
from attention_conformance.run.again import command_of, script_of
from attention_conformance.run.job import Job, job_of
from attention_conformance.run.kernels import judge_question, questions_of
from attention_conformance.verdict.expected import Expected, Origin, expected_of, met, unmatched
from attention_conformance.verdict.judge import offered
from attention_conformance.written.story import story


@dataclass(frozen=True)
class CaseTest:
    """A case of a kernel, as a test.

    Attributes
    ----------
    name : str
        Its case and dtype, as in ``empty-row-mask-float32``.
    """

    name: str
    _judge: Callable[[], Finding] = field(repr=False)
    _again: Callable[[Finding], list[str]] = field(repr=False)

    def check(self) -> Finding:
        """Run the case: fail with what is wrong, skip what the kernel refuses, and expect what is expected.

        Returns
        -------
        Finding
            One that is right, or accepted by name.
        """
        __tracebackhide__ = True
        with warnings.catch_warnings(action="ignore"):
            result = self._judge()
        if result.verdict in ("refused", "not offered", "not understood"):
            pytest.skip(f"{result.label}: {result.detail}")
        if result.verdict == "accepted" and result.reason:
            pytest.xfail(result.reason)
        if result.verdict not in ("right", "accepted"):
            pytest.fail("\n".join([*_lines(result), *self._again(result)]), pytrace=False)
        return result


def case_tests(target: str, options: Options) -> list[CaseTest]:
    """The tests of a target, by the options that were chosen."""
    job = job_of(target, options, power=False)  # tests say nothing of planted faults
    kernel = load_target(target, **job.declared)
    other = kernel if job.same_bits_as == target else load_target(job.same_bits_as) if job.same_bits_as else None
    return _tests(kernel, job, expected_of(target, options.expected), other)


def _tests(kernel: Subject, job: Job, expected: Sequence[Expected], same_bits_as: Subject | None) -> list[CaseTest]:
    """A test for each question that the kernel offers; the first shows that there is any answer."""
    if job.complaint:
        raise ValueError(job.complaint)
    again = functools.partial(_again, job)
    with warnings.catch_warnings(action="ignore"):
        kernel, known, asked = questions_of(kernel, job, same_bits_as)
        offers = [each for each in asked if same_bits_as is not None or _is_offered(each)]
    origin = Origin(kernel.device or "cpu", kernel.backend or "")
    if same_bits_as is None and not (job.cases or job.dtypes):
        blanks = [Finding(each.case.name, each.dtype, 0, "", "right") for each in asked]
        named = [each for each in expected if not each.variant]  # of a variant, only results tell
        known += unmatched([*known, *blanks], named, origin)

    def judge(question: Question) -> Finding:
        return met(accept(judge_question(question), job.accepted), expected, origin)

    known = [accept(each, job.accepted) for each in known]
    tests = [CaseTest("any-answer", functools.partial(_any_answer, offers), again)]
    tests += [CaseTest(_slug(each), functools.partial(met, each, expected, origin), again) for each in known]
    tests += [CaseTest(f"{each.case.name}-{each.dtype}", functools.partial(judge, each), again) for each in offers]
    return tests


def _is_offered(question: Question) -> bool:
    try:
        offered(question)
    except NotOffered:
        return False
    return True


def _any_answer(asked: Iterable[Question]) -> Finding:
    """Right if some case is not refused: tests that are all skipped would show nothing."""
    blank = Finding("any-answer", "-", 0, "Some case has an answer.", "right")
    reason = "none is offered"
    for question in asked:
        result = judge_question(question)
        if result.verdict not in ("refused", "not offered"):
            return blank
        reason = result.detail
    detail = f"expected an answer to some case; got none, the last time for {reason}"
    return Finding(blank.case, "-", 0, blank.shows, "visibly wrong", detail=detail)


def _slug(result: Finding) -> str:
    name = re.sub(r"[^\w*?.]+", "-", result.case)
    return name if result.dtype in ("-", "*") else f"{name}-{result.dtype}"


def _lines(result: Finding) -> list[str]:
    """What is wrong, in words."""
    where = "" if result.dtype == "-" else f", {result.dtype}"
    return [f"{result.label}: {result.case}{where}", *(f"  {line}" for line in story(result))]


def _again(job: Job, result: Finding) -> list[str]:
    """How a result is seen again: the command, and a script."""
    if result.dtype in ("-", "*"):
        return []
    lines = ["", f"To see it again: {command_of(result, job.target, job.declared, job.how)}"]
    script = script_of(result, job.target, job.declared, job.how)
    return [*lines, "", "Or in Python:", "", *(f"    {line}".rstrip() for line in script.splitlines())]
