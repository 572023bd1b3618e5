"""The cases for anybody's attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from attention_conformance.cases import CASES
from attention_conformance.cases.case import Case
from attention_conformance.cases.kernels import KERNELS
from attention_conformance.cases.pairs import PAIRS
from attention_conformance.cases.properties import CORNERS, PROPERTIES
from attention_conformance.run.profiles import is_asked

SUBJECT_CASES: tuple[Case, ...] = (
    *(case for case in CASES if case.measure not in ("message", "autocast")),
    *KERNELS,
    *PROPERTIES,
    *PAIRS,
    *CORNERS,
)
"""The cases for anybody's attention: all but those about the words of errors, and those at kernel sizes."""


OF_OTHERS = (
    "ladder-128x64-causal", "cross-70x200-mask", "decode-grouped", "scores-above-100", "gradient-ladder-64x64-plain"
)  # fmt: skip
"""Cases that are run in all other types that a kernel takes, as it has code for each."""


def matching(cases: Iterable[Case], patterns: Sequence[str]) -> list[Case]:
    """The cases of these names, with ``*`` and ``?``; all where there are none."""
    return [case for case in cases if any(fnmatchcase(case.name, each) for each in patterns or ("*",))]


def subject_cases(patterns: Sequence[str] = (), profile: str = "exact") -> list[Case]:
    """The cases of these names, as far as a profile asks for them."""
    return [case for case in matching(SUBJECT_CASES, patterns) if is_asked(profile, case)]
