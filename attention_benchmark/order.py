"""What a process is told to measure."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Self

from attention_benchmark.problem import Problem

__all__ = ["Order"]


@dataclass(frozen=True)
class Order:
    """What is to be measured in one process.

    Attributes
    ----------
    framework : str
    problems : tuple of Problem
    candidates : tuple of str
        Their keys.
    without : tuple of (str, int)
        Keys, and indices of the problems on which not to try them.
    seconds : float
        What the samples of a candidate may take on one problem.
    rounds : (int, int), optional
        The least and the largest number of rounds.
    limit : float
        Seconds that a call may take.
    threads : int
    memory : bool
        Whether to measure memory, and no time.
    """

    framework: str
    problems: tuple[Problem, ...]
    candidates: tuple[str, ...]
    without: tuple[tuple[str, int], ...] = ()
    seconds: float = 2.0
    rounds: tuple[int, int] | None = None
    limit: float = 60.0
    threads: int = 2
    memory: bool = False

    def write(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """From JSON."""
        fields = json.loads(text)
        problems = tuple(Problem(**each | {"shape": tuple(each["shape"])}) for each in fields["problems"])
        without = tuple((key, place) for key, place in fields["without"])
        rounds = fields["rounds"] and tuple(fields["rounds"])
        return cls(**fields | {"problems": problems, "without": without, "rounds": rounds})
