"""The names that options take: of conventions, faults and cases; and those that a wrong one is near to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from attention_conformance.bits.cases import BITS
from attention_conformance.bits.pair import AS_WHOLE, FACTS
from attention_conformance.cases.large import LARGE
from attention_conformance.cases.shapes import shape_of
from attention_conformance.kernel.probe import PROBES
from attention_conformance.launch.watch import TOUCHED
from attention_conformance.measure.catalogue import KERNEL_CASES, shapes
from attention_conformance.measure.kinds import NAMES
from attention_conformance.mistakes.surprises import SURPRISES
from attention_conformance.mistakes.variants import TEXTS


def case_names() -> list[str]:
    """The names of all cases about a kernel."""
    return [case.name for case in (*KERNEL_CASES, *shapes(), *LARGE, *BITS)]


def not_accepted(names: Iterable[str]) -> str:
    """What is wrong with names for ``accepted``; empty where each is that of a convention, a fault or a case."""
    known = [*TEXTS, *TOUCHED, *NAMES.values(), AS_WHOLE[0], *case_names()]
    known += [name for name, _ in FACTS.values()] + [name for _, name, _ in SURPRISES.values()]
    for name in names:
        if name not in known:
            return f"expected a convention, a fault or a case to accept; got {name!r}{_near(name, known)}"
    return ""


def no_case(pattern: str, *, of_results: bool = False) -> str:
    """What is wrong with a pattern of cases, or of all results; empty where it matches one."""
    known = [*case_names(), *[pattern] * (shape_of(pattern) is not None)]
    others = [*(f"probe: {each}" for each in (*SURPRISES, *PROBES)), *(f"kind: {each}" for each in NAMES)]
    if any(fnmatchcase(name, pattern) for name in [*known, *(["start", "end", *others] if of_results else [])]):
        return ""
    return f"expected a case; got {pattern!r}, which none matches{_near(pattern.strip('*?'), known)}"


def _near(name: str, known: list[str]) -> str:
    words = difflib.get_close_matches(name, {word for each in known for word in each.split("-")}, n=2)
    parts = [each for each in known if any(word and word in each for word in (name, *words))]
    near = list(dict.fromkeys([*difflib.get_close_matches(name, known, n=3), *parts]))[:3]
    return f": perhaps {' or '.join(near)}" if near else ""
