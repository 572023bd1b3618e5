"""What a process is to run on a backend of the core: whatever it dies of, another goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import attention_workers as workers
from attention_conformance.measure.finding import Finding, Started
from attention_conformance.measure.messages import Message


@dataclass(frozen=True)
class Order(workers.Order):
    """What is to be run on one backend; ``None`` stands for all there are.

    Attributes
    ----------
    devices, dtypes, modes, implementations : tuple of str, optional
    model : Path, optional
        A directory with an encoder or a language model, or a GGUF file, whose bits are compared as well.
    quick : bool
        Whether to run eager calls in float32 alone, on the first device unless others are named. Bits are compared of
        one eager call of each case then.
    long : bool
        Whether a language model continues more prompts, and in more modes.
    recipe : Recipe, optional
        What is computed in place of the cases.
    skip : int
        How many trials have been run already.
    """

    backend: str
    cases: tuple[str, ...]
    devices: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    implementations: tuple[str, ...] | None = None
    model: Path | None = None
    quick: bool = False
    long: bool = False
    recipe: Any = None
    skip: int = 0

    def noted(self, message: Message, at: Any) -> tuple[Order, Any]:
        """What is left after a message, and where the process is."""
        if isinstance(message, Finding):
            return replace(self, skip=self.skip + 1), None
        return self, message if isinstance(message, Started) else at

    def lost(self, at: Any, death: workers.Death) -> tuple[list[Finding], Order | None]:
        """The finding for the death of a process, and what another has to do: the case that it died of fails."""
        if at is None:
            found = Finding("start", "-", 0, "The library loads.", "crashed", backend=self.backend, measure="exact")
            found = replace(found, device="-", mode="-", implementation="-")
        else:
            found = replace(at.finding, verdict="crashed")
        left = None if at is None else replace(self, skip=self.skip + 1)
        return [replace(found, error=math.inf, detail=death.reason)], left
