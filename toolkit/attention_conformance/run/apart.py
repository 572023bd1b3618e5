"""Judges a subject whose process nobody trusts: its arrays are compared here, and it is called without the kit."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from attention_conformance.cases.shapes import shape_of
from attention_conformance.launch.call import outputs, place, to_numpy
from attention_conformance.launch.subject import Subject
from attention_conformance.launch.watch import TOUCHED
from attention_conformance.measure.finding import WRONG, Finding
from attention_conformance.measure.messages import OF_REFUSAL, Described, Message, Refused, Returned
from attention_conformance.measure.question import Question
from attention_conformance.run.job import Job
from attention_conformance.run.questions import questions
from attention_conformance.verdict.judge import asked, graded


def distrusted(job: Job, messages: Iterator[Message | Returned]) -> Iterator[Message]:
    """The findings of a job whose process is not believed: arrays are compared, and each question has one answer.

    What is asked is known by the facts that the process tells first; a question that it passes over has crashed.
    """
    owed: dict[tuple[str, str], Question] | None = None
    plain = list[Question]()  # that were right
    for message in messages:
        if isinstance(message, Described) and owed is None:
            owed = {(each.case.name, each.dtype): each for each in questions(_subject_of(message.facts), job)}
        if isinstance(message, Finding) and message.dtype == "-":
            owed = {} if message.case in ("start", "end") else owed
            yield message
        elif isinstance(message, Finding | Returned):
            question = (owed or {}).pop((message.case, message.dtype), None)
            if question is not None and isinstance(message, Returned):
                found = graded(question, message.arrays)
                plain += [question] * (
                    found.verdict == "right"
                    and question.case.measure == "ulp"
                    and shape_of(question.case.name) is not None
                )
                yield found
            elif question is not None and isinstance(message, Finding):
                told = {name: getattr(message, name) for name in OF_REFUSAL}
                yield replace(question.blank, **told)
        else:
            owed = {} if isinstance(message, Refused) else owed
            yield message
    for question in (owed or {}).values():
        yield replace(question.blank, verdict="crashed", detail="its process told nothing of it")
    for question in [each for each in plain if each.dtype == "float32"][-1:]:
        yield from _unlike_alone(question, job.target)


ALONE = """
import importlib, pickle, pkgutil, runpy, sys
import numpy as np

source, name, make, result = sys.argv[1:]
arguments, words = pickle.load(sys.stdin.buffer)
module = runpy.run_path(source) if source.endswith(".py") else vars(importlib.import_module(source))
put = lambda each: pkgutil.resolve_name(make)(each) if isinstance(each, np.ndarray) else each
found = module[name](*map(put, arguments), **{word: put(each) for word, each in words.items()})
np.save(result, np.asarray(found[0] if isinstance(found, (tuple, list)) else found))
"""
"""A program that calls an attention, and has no line of the kit."""

MAKE = {"torch": "torch:from_numpy", "jax": "jax.numpy:asarray", "tensorflow": "tensorflow:convert_to_tensor"}
"""What makes an array of a library from one of NumPy."""


def _unlike_alone(question: Question, target: str) -> Iterator[Finding]:
    """A finding where a process without a line of the kit, which calls the subject once, gets a wrong answer."""
    problem, backend = asked(question), question.backend
    source, _, name = target.rpartition(":")

    def alone(*arguments: Any, **words: Any) -> Any:
        sent = pickle.dumps(backend.to_numpy((list(arguments), words)))
        with tempfile.TemporaryDirectory() as folder:
            result = str(Path(folder) / "output.npy")
            command = [sys.executable, "-c", ALONE, source, name, MAKE.get(backend.name, "numpy:asarray"), result]
            subprocess.run(command, input=sent, capture_output=True, check=True, timeout=300)
            return backend.from_numpy(np.load(result))

    # A program that fails makes another call than was made here.
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        arrays = place(problem, question.subject, backend, question.device)
        called = replace(question.subject, function=alone)
        found = graded(question, to_numpy(outputs(problem, called, arrays, backend.namespace), backend))
        if found.verdict in WRONG:
            found = replace(found, case="probe: alone", dtype="-", variant="unlike-alone", kinds=())
            yield replace(found, verdict="silently wrong", says=TOUCHED["unlike-alone"])


def _subject_of(facts: Mapping[str, Any]) -> Subject:
    """The subject of another process as that tells it, but for the dtype of its results: another is wrong."""
    known = {name: each for name, each in facts.items() if name in Subject.__dataclass_fields__} | {"keeps_dtype": True}
    return Subject(_uncalled).learned({"device": "cpu", **known})  # no library is asked for its first device


def _uncalled(*arguments: Any) -> None:
    """Stands for the subject, which another process calls."""
