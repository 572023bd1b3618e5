"""What a process is to run, on a backend of the core or on a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import attention_workers as workers
from attention_conformance.call import one_line
from attention_conformance.kernel.options import FACTS, VALUES, Options, named_keywords, word_of
from attention_conformance.kernel.probe import AFTER_A_CRASH
from attention_conformance.measure.finding import Finding
from attention_conformance.measure.messages import Asked, Message, packed, unpacked
from attention_conformance.measure.profiles import PROFILES
from attention_conformance.problem import DTYPES
from attention_conformance.processes import Cases
from attention_conformance.run.names import no_case, not_accepted


@dataclass(frozen=True)
class Job(Cases):
    """What is to be run on a target, and what is known of it already.

    Attributes
    ----------
    declared : mapping
        Fields of `Subject`, and ``backward``.
    cases, dtypes : tuple of str
        Patterns of names, and dtypes; by default all cases in float32 and a type of 16 bits, and a few in the other.
    profile : str
        ``exact``, ``kernel`` or ``tf32``.
    same_bits_as : str
        Another target, or the same, whose bits are compared, in place of the cases.
    power : bool
        Whether faults are planted.
    is_trusted : bool
        Whether the process that calls the kernel may also compare.
    known : mapping
        Answers to questions about the kernel, of a former process.
    """

    declared: Mapping[str, Any] = field(default_factory=dict)
    cases: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    profile: str = "kernel"
    same_bits_as: str = ""
    accepted: tuple[str, ...] = ()
    seed: int = 0
    power: bool = True
    is_trusted: bool = True
    known: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def how(self) -> str:
        """How it is judged: by a profile, or another target, as `command_of` takes it."""
        return f"same-bits-as {self.same_bits_as}" if self.same_bits_as else self.profile

    @property
    def complaint(self) -> str:
        """Why it cannot be done as it is asked; empty where it can."""
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                return f"expected a dtype out of {', '.join(DTYPES)}; got {dtype!r}"
        if self.seed < 0:
            return f"expected a seed from 0; got {self.seed}"
        if self.profile not in PROFILES:
            return f"expected a profile out of {', '.join(PROFILES)}; got {self.profile!r}"
        return next((wrong for wrong in (not_accepted(self.accepted), *map(no_case, self.cases)) if wrong), "")

    def packed(self, message: Any) -> bytes:
        """A message as bytes; from a process that nobody trusts as text and numbers alone."""
        return super().packed(message) if self.is_trusted else packed(message)

    def unpacked(self, data: bytes) -> Any:
        """The message that bytes hold; a `Death` where a process that nobody trusts sent anything else."""
        if self.is_trusted:
            return super().unpacked(data)
        try:
            return unpacked(data)
        except Exception as error:  # whatever the bytes are taken for
            return workers.Death(f"its process sent what is no answer: {one_line(error)}", code=1)

    def noted(self, message: Message, at: Finding | None) -> tuple[Cases, Finding | None]:
        """The order with an answer about the kernel, which is that of a crash until there is one."""
        if not isinstance(message, Asked):
            return super().noted(message, at)
        if message.facts is not None:
            return replace(self, known={**self.known, message.question: message.facts}), None
        supposed = AFTER_A_CRASH.get(message.question, {})
        return replace(self, known={**self.known, message.question: supposed}), unanswered(message.question)


def job_of(target: str, options: Options, **others: Any) -> Job:
    """The job of a target by options, where None is none, and by other fields.

    Raise ValueError for a value or a keyword that is not known.
    """
    for name, values in VALUES.items():
        if getattr(options, name) not in (None, *values):
            raise ValueError(f"expected a {word_of(name)} out of {', '.join(values)}; got {getattr(options, name)!r}")
    declared = {fact: getattr(options, name) for name, fact in FACTS.items() if getattr(options, name) is not None}
    declared |= named_keywords(options.keyword or ())
    cases, dtypes, accepted = (tuple(each or ()) for each in (options.case, options.dtype, options.accept))
    others |= {"profile": options.profile, "same_bits_as": options.same_bits_as, "seed": options.seed or 0}
    return Job(target, declared, cases, dtypes, accepted=accepted, **others)


def unanswered(question: str, detail: str = "") -> Finding:
    """Stands for a question about the kernel that has no answer."""
    return Finding(f"probe: {question}", "-", 0, "Small calls tell what a subject expects.", "crashed", detail=detail)
