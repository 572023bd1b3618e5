"""Draws calls of a subject by Hypothesis, and shrinks one that is wrong to the least that still is."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attention_conformance.cases.case import Case, Draw, hard
from attention_conformance.cases.kernels import attention
from attention_conformance.problem import Problem
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
KINDS = ("contiguous", "permuted", "transposed", "every-second", "part", "offset")
NAMES = ("query", "key", "value")
RULES = {"empty rows": "mask"}
"""Those of `attention` that others begin with."""


@dataclass(frozen=True)
class Sizes:
    """What the numbers of a call are drawn from."""

    batch: int = 1
    heads: int = 1
    groups: int = 1
    queries: int = 1
    keys: int = 1
    width: int = 16
    rule: str = "plain"
    deviation: float = 1.0
    shift: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Drawn:
    """One call: its numbers, its options, and how its arrays lie in memory."""

    sizes: Sizes
    dtype: str
    memory: tuple[tuple[str, str], ...] = ()
    scale: float | None = None
    has_gradient: bool = False

    def problem(self) -> Problem:
        """The arrays and options of the call."""
        of, draw = self.sizes, Draw(self.dtype, self.sizes.seed, "fuzz")
        options = {} if self.scale is None else {"scale": self.scale}
        problem = attention(
            draw, of.queries, of.keys, of.width, RULES.get(of.rule, of.rule), heads=of.heads, groups=of.groups,
            batch=of.batch, gradient=self.has_gradient, deviation=of.deviation, **options,
        )  # fmt: skip
        problem.arrays["key"][..., 0] += problem.arrays["key"].dtype.type(of.shift)  # scores far from 0
        if of.rule == "empty rows":
            problem.arrays["mask"][..., 0, :] = False
        return problem.changed(memory=dict(self.memory))


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
    layout = subject.layout or "BHSD"
    rules = ["plain"]
    rules += ["causal"] if subject.causal != "none" else []
    rules += ["mask", "lengths", "empty rows"] if subject.mask != "none" or subject.bias_name else []
    sizes = st.one_of(st.integers(1, 320), st.sampled_from(EDGES))  # the first is the one that shrinks

    def drawn(draw: Any) -> Drawn:
        groups = draw(st.integers(1, 3)) if "H" in layout else 1
        share = draw(st.integers(1, 4)) if subject.grouped and "H" in layout else 1
        of = Sizes(
            batch=draw(st.integers(1, 4)) if "B" in layout else 1,
            heads=groups * share,
            groups=groups,
            queries=draw(sizes),
            keys=draw(sizes),
            width=draw(st.sampled_from(WIDTHS)),
            rule=draw(st.sampled_from(rules)),
            deviation=draw(st.sampled_from((1.0, 0.25, 2.0))),
            shift=draw(st.sampled_from((0.0, 8.0, -8.0))),
            seed=draw(st.integers(0, 2**16)),
        )
        memory = tuple((name, kind) for name in NAMES if (kind := draw(st.sampled_from(KINDS))) != "contiguous")
        gradient = subject.backend == "torch" and bool(subject.differentiates) and subject.backward is None
        return Drawn(
            of,
            draw(st.sampled_from(dtypes)),
            memory if subject.backend in ("numpy", "torch") else (),
            draw(st.sampled_from((None, 0.5, -0.25))) if subject.scale_name else None,
            gradient and draw(st.booleans()),
        )

    return st.composite(drawn)()


def _question(drawn: Drawn, subject: Subject, job: Any) -> Question:
    measure = "gradient" if drawn.has_gradient else "ulp"
    case = Case("fuzz", 0, "A drawn call is right.", lambda _: drawn.problem(), bound=hard, measure=measure)
    told: dict[str, Any] = {"accepted": tuple(job.accepted), "power": False, "digits": False}
    return Question(subject, case, drawn.dtype, job.bounds, job.seed, **told)


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
        found = judged(_question(drawn, subject, job))
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
        return seen[-1], count
    except hypothesis.errors.Flaky:  # right the second time
        drawn, found = seen[-1]
        return (drawn, replace(found, detail=f"{found.detail}; right when it was called again")), count
    return None, count


def _script(drawn: Drawn, found: Finding, subject: Subject, job: Any) -> str:
    says = f"{found.verdict.capitalize()}: {found.detail}."
    problem = fit(drawn.problem(), subject)
    return script(problem, subject, job.target, dtype=drawn.dtype, bound=max(found.bound, 1.0), says=says)
