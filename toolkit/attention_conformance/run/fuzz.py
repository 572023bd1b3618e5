"""Draws calls of a subject by Hypothesis, and shrinks one that is wrong to the least that still is."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attention_conformance.cases.case import Case, hard
from attention_conformance.drawn import Drawn, problems
from attention_conformance.oracle.positions import passes
from attention_conformance.problem import Problem
from attention_conformance.run.causes import NARROW_TYPES
from attention_conformance.run.finding import WRONG, Finding
from attention_conformance.run.judge import judged
from attention_conformance.run.question import Question
from attention_conformance.run.script import script
from attention_conformance.subjects.fit import fit
from attention_conformance.subjects.subject import Subject

EXAMPLES = 40
"""Calls of a round; between rounds, the time is looked at."""

EDGES = (1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300)
WIDTHS = (16, 32, 64, 80, 96, 128, 192, 256)
NAMES = ("query", "key", "value")


@dataclass(frozen=True)
class Script:
    """The least wrong call, as a program."""

    text: str


def has_hypothesis() -> bool:
    """Whether Hypothesis is installed."""
    return importlib.util.find_spec("hypothesis") is not None


def _strategy(subject: Subject, dtypes: Sequence[str]) -> Any:
    """All calls that a subject may be asked, the simplest first."""
    st: Any = importlib.import_module("hypothesis.strategies")
    layout, native, takes_masks = subject.layout or "BHSD", bool(subject.native), subject.mask != "none"
    length = st.one_of(st.integers(1, 320), st.sampled_from(EDGES))  # the first is the one that shrinks

    def sizes(draw: Any) -> dict[str, Any]:
        groups = draw(st.integers(1, 3)) if "H" in layout else 1
        share = draw(st.integers(1, 4)) if subject.grouped and "H" in layout else 1
        leading = (draw(st.integers(1, 4)) if "B" in layout else 1,)
        sizes = {"queries": draw(length), "keys": draw(length), "width": draw(st.sampled_from(WIDTHS))}
        return sizes | {"value_width": sizes["width"], "leading": leading, "heads": groups * share, "groups": groups}

    offers = {
        "shift": True,
        "is_causal": subject.causal != "none",
        "mask": takes_masks or subject.bias_name,
        "bias": native or subject.bias_name,
        "sinks": native or subject.sinks_name,
        "softcap": native or subject.softcap_name,
        "scale": native or subject.scale_name,
        "planted": native and takes_masks,
        "memory": subject.backend in ("numpy", "torch"),
        "gradient": subject.backend == "torch" and bool(subject.differentiates) and subject.backward is None,
    }
    names = [name for name, offered in offers.items() if offered]
    strategy = problems(
        st.composite(sizes)(), names, dtypes=dtypes, values=("normal", "narrow", "wide"), scales=(0.5, -0.25)
    )
    # The bound is for sums along a row, which gradients of a broadcast bias and of sinks are not.
    return strategy.map(lambda drawn: replace(drawn, gradient=drawn.gradient and drawn.bias is drawn.sinks is None))


def _problem(drawn: Drawn) -> Problem:
    """With one array for all rules, and with masks and biases of all queries and keys."""
    problem = drawn.problem()
    arrays = {name: problem.arrays[name] for name in (*NAMES, "bias", "sinks") if name in problem.arrays}
    if problem.mask is not None:
        arrays["mask"] = passes(problem.mask, problem)
    for name in {"mask", "bias"} & set(arrays):
        whole = (*arrays[name].shape[:-2], drawn.queries, drawn.keys)
        arrays[name] = np.broadcast_to(arrays[name], whole).copy()
    return problem.changed(arrays={}, mask=None).holding(**arrays)


def _question(drawn: Drawn, subject: Subject, job: Any, causes: bool = True) -> Question:
    measure = "gradient" if drawn.gradient else "ulp"
    case = Case("fuzz", 0, "A drawn call is right.", lambda _: _problem(drawn), bound=hard, measure=measure)
    how: dict[str, Any] = {"accepted": tuple(job.accepted), "power": False, "digits": False, "causes": causes}
    return Question(subject, case, drawn.dtype, job.bounds, job.seed, **how)


class _Wrong(Exception):  # noqa: N818 (a finding about the subject)
    """A drawn call whose result is wrong."""


def fuzzed(subject: Subject, job: Any, dtypes: Sequence[str]) -> Iterator[Finding | Script]:
    """Draw calls for some minutes: a finding for each round, and a script once one is wrong.

    Each round draws from the seed and its number alone, so that the same seed replays the same calls.
    """
    until, number = time.monotonic() + 60 * job.fuzz, 0
    while number == 0 or time.monotonic() < until:
        started = time.perf_counter()
        wrong, count = _round(subject, job, dtypes, number)
        name = f"fuzz-{number}"
        if wrong is not None:
            drawn, found = wrong
            told = replace(found, case=name, detail=f"{found.detail}; {drawn}", seconds=time.perf_counter() - started)
            yield replace(told, shows="A drawn call is right.")
            yield Script(_script(drawn, found, subject, job))
            return
        seconds = time.perf_counter() - started
        yield Finding(name, "-", 0, f"{count} drawn calls are right.", "right", seed=job.seed, seconds=seconds)
        number += 1


def _round(subject: Subject, job: Any, dtypes: Sequence[str], number: int) -> tuple[tuple[Drawn, Finding] | None, int]:
    hypothesis: Any = importlib.import_module("hypothesis")
    seen: list[tuple[Drawn, Finding]] = []
    count = 0

    def is_right(drawn: Drawn) -> None:
        nonlocal count
        count += 1
        causes = bool(job.accepted) or drawn.dtype in NARROW_TYPES  # which may excuse what is wrong
        found = judged(_question(drawn, subject, job, causes))
        if found.verdict in WRONG:
            seen.append((drawn, found))
            raise _Wrong

    check = hypothesis.given(_strategy(subject, dtypes))(is_right)
    check = hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, database=None, print_blob=False,
        report_multiple_bugs=False, suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )(check)  # fmt: skip
    check = hypothesis.seed((job.seed << 20) + number)(check)
    try:
        check()
    except _Wrong:
        drawn, found = seen[-1]
        told = judged(_question(drawn, subject, job))
        return (drawn, told if told.verdict in WRONG else found), count
    except hypothesis.errors.Flaky:  # right the second time
        drawn, found = seen[-1]
        return (drawn, replace(found, detail=f"{found.detail}; right when it was called again")), count
    return None, count


def _script(drawn: Drawn, found: Finding, subject: Subject, job: Any) -> str:
    says = f"{found.verdict.capitalize()}: {found.detail}."
    problem = fit(_problem(drawn), subject)
    return script(problem, subject, job.target, dtype=drawn.dtype, bound=max(found.bound, 1.0), says=says)
