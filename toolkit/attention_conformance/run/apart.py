"""Judges a kernel whose process nobody trusts: its arrays are compared here, and it is called without the kit."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from attention_conformance.call import one_line
from attention_conformance.cases.shapes import shape_of
from attention_conformance.launch.call import outputs, place, to_numpy
from attention_conformance.launch.subject import NotOffered, Subject
from attention_conformance.launch.watch import TOUCHED
from attention_conformance.measure.finding import ENDED, WRONG, Finding
from attention_conformance.measure.messages import OF_REFUSAL, Described, Message, Refused, Returned
from attention_conformance.measure.question import Question
from attention_conformance.run.job import Job
from attention_conformance.run.questions import questions
from attention_conformance.verdict.judge import asked, graded


def distrusted(job: Job, messages: Iterator[Message | Returned]) -> Iterator[Message]:
    """The results of a job whose process is not believed: arrays are compared, and each question has one answer.

    What is asked is known by the facts that the process tells first; a question that it passes over has crashed.
    """
    owed: dict[tuple[str, str], Question] | None = None
    plain = list[Question]()  # that were right
    for message in messages:
        if isinstance(message, Described) and owed is None:
            owed = {(each.case.name, each.dtype): each for each in questions(_kernel_of(message.facts), job)}
        if isinstance(message, Finding) and message.dtype == "-":
            has_ended = message.case in ("start", "end") and message.verdict in ENDED
            owed = {} if has_ended else owed
            yield message
        elif isinstance(message, Finding | Returned):
            question = (owed or {}).pop((message.case, message.dtype), None)
            if question is not None and isinstance(message, Returned):
                finding = graded(question, message.arrays)
                is_plain = question.case.measure == "ulp" and shape_of(question.case.name) is not None
                plain += [question] * (is_plain and question.dtype in MADE and finding.verdict == "right")
                yield finding
            elif question is not None and isinstance(message, Finding):
                refusal = {name: getattr(message, name) for name in OF_REFUSAL}
                yield replace(question.blank, **refusal)
        else:
            owed = {} if isinstance(message, Refused) else owed
            yield message
    for question in (owed or {}).values():
        yield replace(question.blank, verdict="crashed", detail="its process told nothing of it")
    for question in sorted(plain, key=lambda each: MADE.index(each.dtype))[:1]:
        yield from _unlike_alone(question, job.target)


ALONE = """
import functools, importlib, inspect, os, pickle, pkgutil, runpy, sys, types
import numpy as np

source, name, make, result = sys.argv[1:]
arguments, words = pickle.load(sys.stdin.buffer)
sys.path.insert(0, os.path.dirname(source))
module = types.SimpleNamespace(**runpy.run_path(source)) if source.endswith(".py") else importlib.import_module(source)
function = functools.reduce(getattr, name.split("."), module)
put = lambda each: pkgutil.resolve_name(make)(each) if isinstance(each, np.ndarray) else each
arguments, words = [*map(put, arguments)], {word: put(each) for word, each in words.items()}
try:
    inspect.signature(function).bind(*arguments, **words)
except (TypeError, ValueError):
    sys.exit(open(result, "w").close())
output = function(*arguments, **words)
output = [*output.values()] if isinstance(output, dict) else output
output = output[0] if isinstance(output, (tuple, list)) else output
np.save(result, np.asarray(output.detach() if hasattr(output, "detach") else output))
"""
"""A program that calls an attention, and has no line of the kit; an empty file says that the kit calls it otherwise."""

MAKE = {"torch": "torch:from_numpy", "jax": "jax.numpy:asarray", "tensorflow": "tensorflow:convert_to_tensor"}
"""What makes an array of a library from one of NumPy."""

MADE = ("float32", "float16", "float64")
"""Dtypes of which each library makes arrays."""


def _unlike_alone(question: Question, target: str) -> Iterator[Finding]:
    """A result where a process without a line of the kit calls the kernel once, and gets a wrong answer or none."""
    problem, backend = asked(question), question.backend
    source, _, name = target.rpartition(":")

    def alone(*arguments: Any, **words: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as sent:
            pickle.dump(backend.to_numpy((list(arguments), words)), sent)
            sent.seek(0)
            result = Path(folder) / "output.npy"
            command = [sys.executable, "-c", ALONE, source, name, MAKE.get(backend.name, "numpy:asarray"), str(result)]
            streams: Any = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)  # which what it starts may hold
            wide = {**os.environ, "JAX_ENABLE_X64": str(question.dtype == "float64")}
            subprocess.run(command, stdin=sent, check=False, timeout=300, env=wide, **streams)
            if result.is_file() and not result.stat().st_size:
                raise NotOffered
            return backend.from_numpy(np.load(result))

    try:
        arrays = place(problem, question.kernel, backend, question.device)
        called = replace(question.kernel, function=alone)
        finding = graded(question, to_numpy(outputs(problem, called, arrays, backend.namespace), backend))
    except NotOffered:
        return
    except Exception as error:  # no file, or whatever it holds
        if not question.device.lower().startswith("cpu"):  # where alone it would be called
            return
        finding = replace(question.blank, verdict="visibly wrong", detail=f"the call alone: {one_line(error)}")
    if finding.verdict in WRONG and ":" in target:
        finding = replace(finding, case="probe: alone", dtype="-", variant="unlike-alone", kinds=())
        yield replace(finding, verdict="silently wrong", says=TOUCHED["unlike-alone"])


def _kernel_of(facts: Mapping[str, Any]) -> Subject:
    """The kernel of another process as that tells it, but for the dtype of its results: another is wrong."""
    known = {name: each for name, each in facts.items() if name in Subject.__dataclass_fields__} | {"keeps_dtype": True}
    return Subject(_uncalled).learned({"device": "cpu", **known})  # no library is asked for its first device


def _uncalled(*arguments: Any) -> None:
    """Stands for the kernel, which another process calls."""
