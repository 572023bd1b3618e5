"""The order that a worker process carries out."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Self

from attention_benchmark.candidate import Candidate
from attention_benchmark.problem import Problem

__all__ = ["Order"]


@dataclass(frozen=True)
class Order:
    """The measurements to take in one process.

    Attributes
    ----------
    framework : str
    problems : tuple of Problem
    candidates : tuple of str
        The keys of candidates.
    without : tuple of (str, int)
        Pairs of a candidate's key and the index of a problem that are left out.
    seconds : float
        Time for the samples of a candidate on one problem.
    rounds : (int, int), optional
        The least and the largest number of rounds.
    limit : float
        The longest time of a call in seconds.
    threads : int
    memory : bool
        Whether to measure memory instead of time.
    suspect : float, optional
        Compute reference and result again where the error is larger, and keep them in `evidence`.
    evidence : str
        A folder.
    foreign : tuple of Candidate
        Candidates that are not in `CANDIDATES`; their keys are among the candidates.
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
    suspect: float | None = None
    evidence: str = ""
    foreign: tuple[Candidate, ...] = ()

    def write(self) -> str:
        """Write the order as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """Read an order from JSON."""
        fields = json.loads(text)
        problems = tuple(map(Problem.of_row, fields["problems"]))
        without = tuple((key, index) for key, index in fields["without"])
        rounds = fields["rounds"] and tuple(fields["rounds"])
        foreign = tuple(Candidate(**each) for each in fields["foreign"])
        return cls(**fields | {"problems": problems, "without": without, "rounds": rounds, "foreign": foreign})
