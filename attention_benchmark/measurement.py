"""What came of one candidate on one problem, and what is made of the samples."""

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

__all__ = ["Measurement", "fastest_peers", "quartiles", "ratio", "read_json", "write_json"]


@dataclass(frozen=True)
class Measurement:
    """What came of one candidate on one problem.

    Attributes
    ----------
    problem : Problem
    candidate : Candidate
    outcome : str
        ``"measured"``, ``"refused"``, ``"wrong"``, ``"skipped"`` as too much, or ``"died"`` with its process.
    reason : str
        Why it was not measured.
    error : float, optional
        The largest difference from the right result, relative to its largest number.
    first : float, optional
        Seconds of the first call, which compiles.
    seconds : tuple of float
        Seconds of a call, for every round.
    products : tuple of float
        Operations per second of a product of large matrices, for every round.
    memory : int, optional
        Bytes that a call needs at most besides its arguments.
    """

    problem: Problem
    candidate: Candidate
    outcome: str
    reason: str = ""
    error: float | None = None
    first: float | None = None
    seconds: tuple[float, ...] = ()
    products: tuple[float, ...] = ()
    memory: int | None = None

    @property
    def median(self) -> float:
        """Seconds of a call."""
        return statistics.median(self.seconds)

    @property
    def share(self) -> float | None:
        """The rate of operations as a share of that of a product of large matrices, measured in the same rounds."""
        if not self.products:
            return None
        pairs = zip(self.seconds, self.products, strict=True)
        return statistics.median(self.problem.flops / seconds / rate for seconds, rate in pairs)


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(samples) < 2:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third


def ratio(measurement: Measurement, other: Measurement) -> float:
    """How many times as long one takes as the other: the median over the rounds in which both took part."""
    pairs = zip(measurement.seconds, other.seconds, strict=True)
    return statistics.median(own / others for own, others in pairs)


def fastest_peers(measurements: Iterable[Measurement]) -> dict[tuple[Problem, str], Measurement]:
    """The peer that takes least, for every problem and framework."""
    fastest: dict[tuple[Problem, str], Measurement] = {}
    for each in measurements:
        place = each.problem, each.candidate.framework
        if each.candidate.is_peer and each.seconds:
            fastest[place] = min(fastest.get(place, each), each, key=lambda one: one.median)
    return fastest


def write_json(path: Path, measurements: Sequence[Measurement], environment: Mapping[str, Any]) -> None:
    """Write the environment and every sample."""
    rows = [as_row(each) for each in measurements]
    document = json.dumps({"environment": environment, "measurements": rows}, indent=1)
    path.write_text(document + "\n", encoding="utf-8")


def read_json(path: Path) -> tuple[list[Measurement], dict[str, Any]]:
    """Read what `write_json` wrote."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return [of_row(row) for row in document["measurements"]], document["environment"]


def as_row(measurement: Measurement) -> dict[str, Any]:
    """A measurement as JSON has it."""
    row = dataclasses.asdict(measurement)
    return row | {name: [float(f"{each:.4g}") for each in row[name]] for name in ("seconds", "products")}


def of_row(row: Mapping[str, Any]) -> Measurement:
    """A measurement from JSON."""
    samples = {name: tuple(row[name]) for name in ("seconds", "products")}
    problem = Problem(**row["problem"] | {"shape": tuple(row["problem"]["shape"])})
    return Measurement(**{**row, **samples, "problem": problem, "candidate": Candidate(**row["candidate"])})
