"""Draws shapes of further seeds, and makes one that is wrong as small as it can be and still is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from attention_conformance.cases.shapes import NARROW, Shape, case_of, drawn
from attention_conformance.launch.subject import Subject
from attention_conformance.measure.catalogue import offered
from attention_conformance.measure.finding import WRONG, Finding
from attention_conformance.measure.question import Question
from attention_conformance.verdict.judge import judged

LEAST = 40
"""Shapes that are drawn, whatever the time."""

SIMPLEST = (
    {"relation": ""}, {"memory": ""}, {"scores": ""}, {"scale": ""}, {"value_width": 0}, {"rule": "plain"},
    {"rule": "causal"}, {"batch": 1}, {"heads": 1, "groups": 1}, {"heads": 2, "groups": 1}, {"width": 16},
)  # fmt: skip
"""Settings that are tried in place of those of a wrong call."""


def fuzzed(subject: Subject, job: Any, dtypes: Sequence[str]) -> Iterator[Finding]:
    """Draw shapes for some minutes: a finding for each seed, and one of the least call once one is wrong.

    The shapes are those of the seed and its number alone, so that the same seed replays the same calls.
    """
    until, number, count = time.monotonic() + 60 * job.fuzz, 0, 0
    while count < LEAST or time.monotonic() < until:
        started, seed, count = time.perf_counter(), job.seed * 1000 + number, 0
        for shape, narrow in drawn(seed):
            if count >= LEAST and time.monotonic() > until:
                break
            taken, count = offered(shape, subject), count + 1
            dtype = next((each for each in dtypes if (each in NARROW) == narrow), dtypes[0])
            if _wrong(taken, dtype, subject, job, seed) is not None:
                yield from _smallest(taken, dtype, subject, job, seed)
                return
        seconds = time.perf_counter() - started
        yield Finding(f"fuzz-{number}", "-", 0, f"{count} drawn calls are right.", "right", seed=seed, seconds=seconds)
        number += 1


def _question(shape: Shape, dtype: str, subject: Subject, job: Any, seed: int, causes: bool) -> Question:
    told: dict[str, Any] = {"accepted": tuple(job.accepted), "power": False, "digits": False, "causes": causes}
    return Question(subject, case_of(shape), dtype, job.profile, seed, **told)


def _wrong(shape: Shape, dtype: str, subject: Subject, job: Any, seed: int) -> Finding | None:
    causes = bool(job.accepted) or dtype in NARROW  # which may excuse what is wrong
    found = judged(_question(shape, dtype, subject, job, seed, causes))
    return found if found.verdict in WRONG else None


def _smallest(shape: Shape, dtype: str, subject: Subject, job: Any, seed: int) -> Iterator[Finding]:
    """The finding of a wrong shape, once no simpler or smaller one is wrong: its name tells all of the call."""
    sizes, is_smaller = ("queries", "keys", "batch", "width"), True
    while is_smaller:
        is_smaller = False
        halves = [{name: getattr(shape, name) // 2} for name in sizes] + [{name: 1} for name in sizes[:2]]
        less = [{name: getattr(shape, name) - 1} for name in sizes[:2]]
        for change in (*SIMPLEST, *reversed(halves), *less):
            other = replace(shape, **change)
            if other == shape or min(other.queries, other.keys, other.batch) < 1 or other.width < 16:
                continue
            if _size(other) < _size(shape) and _wrong(other, dtype, subject, job, seed) is not None:
                shape, is_smaller = other, True
    yield judged(_question(shape, dtype, subject, job, seed, causes=True))


def _size(shape: Shape) -> tuple[int, int]:
    """Products, and settings that are not the simplest: what gets less with every step."""
    settings = (shape.relation, shape.memory, shape.scores, shape.scale, shape.value_width, shape.rule != "plain")
    return shape.batch * shape.heads * shape.queries * shape.keys * shape.width, sum(map(bool, settings))
