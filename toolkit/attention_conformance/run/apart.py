"""Judges a subject whose process nobody trusts: its arrays are compared here, and it is called without the kit."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from attention_conformance.cases.shapes import shape_of
from attention_conformance.launch.subject import Subject
from attention_conformance.launch.watch import TOUCHED
from attention_conformance.measure.finding import QUIET, Finding
from attention_conformance.measure.messages import OF_REFUSAL, Described, Message, Refused, Returned
from attention_conformance.measure.question import Question
from attention_conformance.run.job import Job
from attention_conformance.run.questions import questions
from attention_conformance.verdict.judge import asked, graded
from attention_conformance.verdict.script import script


def distrusted(job: Job, messages: Iterator[Message | Returned]) -> Iterator[Message]:
    """The findings of a job whose process is not believed: arrays are compared, and each question has one answer.

    What is asked is known by the facts that the process tells first; a question that it passes over has crashed.
    """
    owed: dict[tuple[str, str], Question] | None = None
    plain = list[Question]()  # that were right
    for message in messages:
        if isinstance(message, Described) and owed is None:
            owed = {(each.case.name, each.dtype): each for each in questions(_subject_of(message.facts), job, None)}
        if isinstance(message, Finding) and message.dtype == "-":
            owed = {} if message.case in ("start", "end") else owed
            yield _accepted(message, job)
        elif isinstance(message, Finding | Returned):
            question = (owed or {}).pop((message.case, message.dtype), None)
            if question is not None and isinstance(message, Returned):
                found = graded(question, message.arrays)
                plain += [question] * (
                    found.verdict == "right"
                    and len(question.case.dtypes) > 2
                    and shape_of(question.case.name) is not None
                )
                yield found
            elif question is not None and isinstance(message, Finding):
                told = {name: getattr(message, name) for name in OF_REFUSAL}
                yield _accepted(replace(question.blank, **told), job)
        else:
            owed = {} if isinstance(message, Refused) else owed
            yield message
    for question in (owed or {}).values():
        yield replace(question.blank, verdict="crashed", detail="its process told nothing of it")
    for question in [each for each in plain if each.dtype == "float32"][-1:]:
        yield from [_accepted(each, job) for each in _unlike_alone(question, job.target)]


def _unlike_alone(question: Question, target: str) -> Iterator[Finding]:
    """A finding where a process without a line of the kit, which calls the subject once, gets a wrong answer."""
    problem, dtype = asked(question), question.dtype
    text = script(problem, question.subject, target, dtype=dtype, bound=64.0, says=question.case.shows)
    kept: dict[str, Any] = {"input": text, "capture_output": True, "text": True}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run([sys.executable, "-"], check=False, timeout=300, **kept)
        if done.returncode == 1 and "Traceback" not in done.stderr:  # which is that of another call than was made here
            found = replace(question.blank, case="probe: alone", verdict="silently wrong", variant="unlike-alone")
            yield replace(found, says=TOUCHED["unlike-alone"], detail=done.stdout.strip()[-200:])


def _accepted(found: Finding, job: Job) -> Finding:
    is_named = found.verdict not in QUIET and {found.variant, found.case} & set(job.accepted)
    return replace(found, verdict="accepted") if is_named else found


def _subject_of(facts: Mapping[str, Any]) -> Subject:
    """The subject of another process as that tells it, but for the dtype of its results: another is wrong."""
    known = {name: each for name, each in facts.items() if name in Subject.__dataclass_fields__} | {"keeps_dtype": True}
    return Subject(_uncalled).learned({"device": "cpu", **known})  # no library is asked for its first device


def _uncalled(*arguments: Any) -> None:
    """Stands for the subject, which another process calls."""
