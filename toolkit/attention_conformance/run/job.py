"""What is to be run on a target, and what its run tells before there are findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attention_conformance.problem import DTYPES
from attention_conformance.run.names import no_case, not_accepted
from attention_conformance.run.profiles import PROFILES
from attention_workers import Order

__all__ = ["Asked", "Described", "Job", "Refused"]


@dataclass(frozen=True)
class Job(Order):
    """What is to be run on a target, and what is known of it already.

    Attributes
    ----------
    target : str
    declared : mapping
        Fields of `Subject`, and ``backward``.
    cases, dtypes : tuple of str
        Patterns of names, and dtypes; by default all cases in float32 and a type of 16 bits, and a few in the other.
    profile : str
    like : str
        Another target, whose error is allowed twice.
    same_bits_as : str
        Another target, or the same, whose bits are compared, in place of the cases.
    accepted : tuple of str
    seed : int
    power : bool
        Whether faults are planted.
    fuzz : float
        Minutes for drawn calls, in place of the cases.
    is_trusted : bool
        Whether the process that calls the subject may also compare.
    is_large : bool
        Whether the large cases are run, in place of the others.
    known : mapping
        Answers to questions about the subject, of a former process.
    done : frozenset
        Pairs of case and dtype that are not to be run again.
    """

    target: str
    declared: Mapping[str, Any] = field(default_factory=dict)
    cases: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    profile: str = "kernel"
    like: str = ""
    same_bits_as: str = ""
    accepted: tuple[str, ...] = ()
    seed: int = 0
    power: bool = True
    fuzz: float = 0.0
    is_trusted: bool = True
    is_large: bool = False
    known: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    done: frozenset[tuple[str, str]] = frozenset()

    @property
    def how(self) -> str:
        """How it is judged: by a profile, or another target, as `command_of` takes it."""
        if self.same_bits_as:
            return f"same-bits-as {self.same_bits_as}"
        return f"like {self.like}" if self.like else self.profile

    @property
    def complaint(self) -> str:
        """Why it cannot be done as it is asked; empty where it can."""
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                return f"expected a dtype out of {', '.join(DTYPES)}; got {dtype!r}"
        if self.profile not in PROFILES:
            return f"expected a profile out of {', '.join(PROFILES)}, 'like TARGET'; got {self.profile!r}"
        return next((wrong for wrong in (not_accepted(self.accepted), *map(no_case, self.cases)) if wrong), "")


@dataclass(frozen=True)
class Asked:
    """A question about the subject: before its answer, and with it."""

    question: str
    facts: dict[str, Any] | None = None


@dataclass(frozen=True)
class Described:
    """What is supposed of the subject, how each fact is known, versions, and how many cases there are to run.

    ``target`` is that of the other subject, where this is about it.
    """

    facts: Mapping[str, Any]
    sources: Mapping[str, str]
    versions: Mapping[str, str]
    count: int
    target: str = ""


@dataclass(frozen=True)
class Refused:
    """Why a target cannot be checked at all."""

    reason: str
