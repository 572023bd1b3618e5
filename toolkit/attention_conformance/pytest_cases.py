"""Tests for pytest, one for each case that a subject can be asked."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from attention_conformance.run.again import command_of, script_of
from attention_conformance.run.expected import Expected, Origin, expected_of, met, unmatched
from attention_conformance.run.finding import Finding
from attention_conformance.run.job import Job
from attention_conformance.run.judge import offered
from attention_conformance.run.question import Question
from attention_conformance.run.subjects import answered, asked_of
from attention_conformance.subjects.options import OPTIONS, named_keywords
from attention_conformance.subjects.signature import KEYWORDS
from attention_conformance.subjects.subject import NotOffered, Subject
from attention_conformance.subjects.target import load_target
from attention_conformance.written.story import story


@dataclass(frozen=True)
class SubjectTest:
    """A case of a subject, as a test.

    Attributes
    ----------
    name : str
        Its case and dtype, as in ``empty-row-mask-float32``.
    """

    name: str
    _judge: Callable[[], Finding] = field(repr=False)
    _again: Callable[[Finding], list[str]] = field(repr=False)

    def check(self) -> Finding:
        """Run the case: fail with what is wrong, skip what the subject refuses, and expect what is expected.

        Returns
        -------
        Finding
            One that is right, or accepted by name.
        """
        __tracebackhide__ = True
        with warnings.catch_warnings(action="ignore"):
            finding = self._judge()
        if finding.verdict in ("refused", "not offered", "not understood"):
            pytest.skip(f"{finding.verdict}: {finding.detail}")
        if finding.verdict == "accepted" and finding.reason:
            pytest.xfail(finding.reason)
        if finding.verdict not in ("right", "accepted"):
            pytest.fail("\n".join([*_told(finding), *self._again(finding)]), pytrace=False)
        return finding


def attention_cases(
    subject: Subject | Callable[..., Any] | str,
    *,
    cases: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    profile: str = "kernel",
    accepted: Sequence[str] = (),
    seed: int = 0,
    expected: str | Path | None = None,
    same_bits_as: Subject | str | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test function by the cases of a subject: its argument ``case`` is a `SubjectTest`.

    Parameters
    ----------
    subject : Subject, callable or str
        A callable is described by its signature and small calls; a text is a target, such as ``torch.sdpa``.
    cases, dtypes, profile, accepted, seed
        Those of `check_subject`; the profile may be ``like TARGET``.
    expected : str or Path, optional
        A file of findings that are expected, or ``shipped``.
    same_bits_as : Subject or str, optional
        Another subject or target, or the same: the tests compare bits of different calls, in place of the cases.

    Returns
    -------
    decorator
    """
    target = subject if isinstance(subject, str) else ""
    if isinstance(subject, str):
        subject = load_target(subject)
    elif not isinstance(subject, Subject):
        subject = Subject(subject)
    chosen = {"case": cases, "dtype": dtypes, "profile": profile, "accept": accepted, "seed": seed}
    other = None if same_bits_as is None or isinstance(same_bits_as, str) else same_bits_as
    if isinstance(same_bits_as, str):
        other = subject if same_bits_as == target else load_target(same_bits_as)
    elif other is not None:
        same_bits_as = _target_of(other.function)
    chosen["same-bits-as"] = same_bits_as or ""
    job = _job(target or _target_of(subject.function), _declared(subject), chosen)
    tests = _tests(subject, job, expected_of(target, None if expected is None else str(expected)), other)
    return pytest.mark.parametrize("case", [pytest.param(each, id=each.name) for each in tests])


def target_tests(target: str, options: Mapping[str, Any]) -> list[SubjectTest]:
    """The tests of a target, by the options of `OPTIONS` that were chosen."""
    chosen = {name: each for name, each in options.items() if each is not None}
    declared = {each.fact: chosen[name] for name, each in OPTIONS.items() if each.fact and name in chosen}
    declared |= named_keywords(chosen.get("keyword", ()))
    job, subject = _job(target, declared, chosen), load_target(target, **declared)
    other = subject if job.same_bits_as == target else load_target(job.same_bits_as) if job.same_bits_as else None
    return _tests(subject, job, expected_of(target, chosen.get("expected")), other)


def _job(target: str, declared: Mapping[str, Any], chosen: Mapping[str, Any]) -> Job:
    """A job by options of `OPTIONS`, without planted faults, as tests tell nothing of them."""
    cases, dtypes, accepted = (tuple(chosen.get(name, ())) for name in ("case", "dtype", "accept"))
    how: dict[str, Any] = {"profile": chosen.get("profile", "kernel"), "same_bits_as": chosen.get("same-bits-as", "")}
    return Job(target, declared, cases, dtypes, accepted=accepted, seed=chosen.get("seed", 0), power=False, **how)


def _tests(subject: Subject, job: Job, expected: Sequence[Expected], same_bits_as: Subject | None) -> list[SubjectTest]:
    """A test for each question that the subject offers; the first shows that there is any answer."""
    if job.complaint:
        raise ValueError(job.complaint)
    again = functools.partial(_again, job)
    with warnings.catch_warnings(action="ignore"):
        subject, known, asked = asked_of(subject, job, load_target(job.like) if job.like else None, same_bits_as)
        offers = [each for each in asked if same_bits_as is not None or _is_offered(each)]
    origin = Origin(subject.device or "cpu", subject.backend or "")
    if same_bits_as is None and (job.cases or job.dtypes):
        known = []
    elif same_bits_as is None:
        blanks = [Finding(each.case.name, each.dtype, 0, "", "right") for each in asked]
        named = [each for each in expected if not each.variant]  # of a variant, only results tell
        known += unmatched([*known, *blanks], named, origin)

    def judge(question: Question) -> Finding:
        return met(answered(question), expected, origin)

    tests = [SubjectTest("any-answer", functools.partial(_any_answer, offers), again)]
    tests += [SubjectTest(_slug(each), functools.partial(met, each, expected, origin), again) for each in known]
    tests += [SubjectTest(f"{each.case.name}-{each.dtype}", functools.partial(judge, each), again) for each in offers]
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
    for each in asked:
        finding = answered(each)
        if finding.verdict not in ("refused", "not offered"):
            return blank
        reason = finding.detail
    detail = f"expected an answer to some case; got none, the last time for {reason}"
    return Finding(blank.case, "-", 0, blank.shows, "visibly wrong", detail=detail)


def _slug(finding: Finding) -> str:
    name = re.sub(r"[^\w*?.]+", "-", finding.case)
    return name if finding.dtype in ("-", "*") else f"{name}-{finding.dtype}"


def _told(finding: Finding) -> list[str]:
    """What is wrong, in words."""
    where = "" if finding.dtype == "-" else f", {finding.dtype}"
    return [f"{finding.verdict}: {finding.case}{where}", *(f"  {line}" for line in story(finding))]


def _again(job: Job, finding: Finding) -> list[str]:
    """How a finding is seen again: the command where there is one, and a script."""
    if finding.dtype in ("-", "*") or not job.target:
        return []
    lines = []
    if set(job.declared) <= {*KEYWORDS, *(each.fact for each in OPTIONS.values())}:
        lines = ["", f"To see it again: {command_of(finding, job.target, job.declared, job.how)}"]
    script = script_of(finding, job.target, job.declared, job.how)
    return [*lines, "", "Or in Python:", "", *(f"    {line}".rstrip() for line in script.splitlines())]


def _declared(subject: Subject) -> dict[str, Any]:
    """What a script has to say of a subject once more."""
    declared = {name: each for name, each in subject.declared.items() if name != "name"}
    pair = {} if subject.backward is None else {"backward": _target_of(subject.backward)}
    return declared | pair


def _target_of(function: Callable[..., Any]) -> str:
    """A function as a target: the file that it stands in, and its name; empty where it has none."""
    try:
        path = Path(inspect.getsourcefile(function) or "")
    except TypeError:  # a built-in, or an object that is called
        return ""
    name = getattr(function, "__qualname__", "<lambda>")
    if not path.is_file() or "<" in name:
        return ""
    here = Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{name}"
