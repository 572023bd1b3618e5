"""Cases that a process is to run: whatever it dies of is what came of its case, and another goes on with the next."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import attention_workers as workers
from attention_conformance.measure.finding import Finding, Started

MOST_CRASHES = 12
"""Crashes after which a run ends: a new process takes seconds."""

DEVICE_LOST = 79
"""The exit status of a process that has sent the result of a crash by itself, as its device answers no more."""


@dataclass(frozen=True)
class Cases(workers.Order):
    """Cases of a target, one after the other.

    Attributes
    ----------
    target : str
        What is called: an attention, or a backend of the core.
    skip : int
        How many cases former processes have begun.
    crashes : int
        How many of these processes have died.
    """

    target: str
    skip: int = field(default=0, kw_only=True)
    crashes: int = field(default=0, kw_only=True)

    @property
    def start(self) -> Finding:
        """Stands for the start of a process."""
        return Finding("start", "-", 0, "The target loads.", "crashed")

    def noted(self, message: Any, at: Finding | None) -> tuple[Cases, Finding | None]:
        """The order from the next case on, and the case that is run."""
        if isinstance(message, Started):
            return replace(self, skip=self.skip + 1), message.result
        return self, at

    def lost(self, at: Finding | None, death: workers.Death) -> tuple[list[Finding], Cases | None]:
        """The result for the case that a process died of, and the cases after it."""
        verdict, left = "timed out" if death.code is None else "crashed", replace(self, crashes=self.crashes + 1)
        detail = death.reason + _frame(death.stack, self.target)
        result = replace(at or self.start, verdict=verdict, detail=detail, traceback=death.stack)
        findings = [] if death.code == DEVICE_LOST else [result]
        if at is None or left.crashes < MOST_CRASHES:
            return findings, left if at else None
        end = replace(self.start, case="end", shows="The run goes on after a crash.")
        return [*findings, replace(end, detail=f"{left.crashes} crashes: the rest is not run")], None


@dataclass(frozen=True)
class Order(Cases):
    """What is to be run on one backend of the core; ``None`` stands for all there are.

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
    """

    cases: tuple[str, ...]
    devices: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    implementations: tuple[str, ...] | None = None
    model: Path | None = None
    quick: bool = False
    long: bool = False
    recipe: Any = None

    @property
    def start(self) -> Finding:
        """Stands for the start of a process, in no way of running."""
        finding = replace(super().start, backend=self.target, device="-", measure="exact")
        return replace(finding, mode="-", implementation="-")


def _frame(stack: str, target: str) -> str:
    """The innermost call in the file of a target; empty where there is none."""
    file = target.rpartition(":")[0]
    if not file.endswith(".py"):
        return ""
    match = re.search(rf'File "[^"]*{re.escape(Path(file).name)}", line (\d+) in (\S+)', stack)
    return "" if match is None else f", in line {match[1]} of {Path(file).name} ({match[2]})"
