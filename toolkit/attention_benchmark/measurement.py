"""Measurements of one candidate on one problem, and statistics of their samples."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention_benchmark.candidate import Candidate
from attention_benchmark.problem import Problem
from attention_files.writing import write_file


@dataclass(frozen=True)
class Measurement:
    """The result of one candidate on one problem.

    Attributes
    ----------
    outcome : str
        ``"measured"``, ``"refused"``, ``"wrong"``, ``"skipped"`` as too expensive, or ``"died"`` with its process.
    reason : str
        Why it was not measured.
    error : float, optional
        The largest difference from the reference, relative to its largest magnitude.
    first : float, optional
        Seconds of the first call, which compiles.
    seconds : tuple of float
        Seconds of a call, for each round.
    memory : int, optional
        Peak memory of a call in bytes, without its arguments.
    """

    problem: Problem
    candidate: Candidate
    outcome: str
    reason: str = ""
    error: float | None = None
    first: float | None = None
    seconds: tuple[float, ...] = ()
    memory: int | None = None

    @property
    def median(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.seconds)


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(samples) < 2:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third


def ratio(measurement: Measurement, other: Measurement) -> float:
    """The median over the rounds of the ratio of two times."""
    pairs = zip(measurement.seconds, other.seconds, strict=True)
    return statistics.median(first / second for first, second in pairs)


def fastest_peers(measurements: Iterable[Measurement]) -> dict[tuple[Problem, str], Measurement]:
    """The fastest peer for each problem and framework."""
    fastest: dict[tuple[Problem, str], Measurement] = {}
    for each in measurements:
        group = each.problem, each.candidate.framework
        if each.candidate.is_peer and each.seconds:
            fastest[group] = min(fastest.get(group, each), each, key=lambda one: one.median)
    return fastest


def write_json(path: Path, measurements: Sequence[Measurement], environment: Mapping[str, Any]) -> None:
    """Write the environment and all samples."""
    rows = [dataclasses.asdict(each) for each in measurements]
    for row in rows:
        row["seconds"] = [float(f"{each:.4g}") for each in row["seconds"]]
    write_file(path, (json.dumps({"environment": environment, "measurements": rows}, indent=1) + "\n").encode())
