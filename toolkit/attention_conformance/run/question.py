"""What is asked of a subject: one case, in one way, and how the answer is judged."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attention_conformance.cases.case import Case
from attention_conformance.problem import Problem
from attention_conformance.run.finding import Finding
from attention_conformance.subjects.subject import Subject
from attention_core.backend import Backend, get_backend

__all__ = ["Question"]


@dataclass(frozen=True)
class Question:
    """One case for one subject, and how it is judged.

    ``like`` is another subject, whose error is allowed twice. ``accepted`` names conventions and faults that pass.
    ``digits`` asks for the oracle of 50 digits where a problem is small, which takes longer.
    Without ``is_trusted``, calls of the framework's own attention are found.
    ``other`` is the subject whose bits are compared. ``mode`` is how its library runs a call, by default eagerly, or as
    one program where it compiles each operation for itself otherwise.
    ``variables`` are the arrays whose gradients are asked for, by default all, and ``between`` is called before the
    backward pass.
    The core is asked on a ``library`` for an ``implementation``, unless there is a ``reason`` not to.
    """

    subject: Subject
    case: Case
    dtype: str
    profile: str = "kernel"
    seed: int = 0
    accepted: tuple[str, ...] = ()
    like: Subject | None = None
    power: bool = True
    digits: bool = True
    is_trusted: bool = True
    variables: tuple[str, ...] = ()
    between: Problem | None = None
    other: Subject | None = None
    mode: str = ""
    library: Backend | None = None
    implementation: str = ""
    reason: str = ""

    @property
    def backend(self) -> Backend:
        """The library of the subject."""
        return self.library or get_backend(self.subject.backend or "numpy")

    @property
    def device(self) -> str:
        """The device that the subject computes on."""
        return self.subject.device or self.backend.devices()[0]

    @property
    def blank(self) -> Finding:
        """What is known before a call."""
        case = self.case
        found = Finding(case.name, self.dtype, case.line, case.shows, "right", seed=self.seed)
        if self.library is None:
            return found
        found = replace(found, backend=self.library.name, device=self.device, mode=self.mode)
        return replace(found, implementation=self.implementation, measure=case.measure)
