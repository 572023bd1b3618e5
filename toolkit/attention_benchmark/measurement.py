"""Measurements of one candidate on one problem, and statistics of their samples."""

from __future__ import annotations

import dataclasses
import gzip
import json
import statistics
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention_benchmark.candidate import Candidate
from attention_benchmark.problem import Problem
from attention_files.writing import FileError, write_file

SAMPLES = ("seconds", "products", "copies")


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
    products : tuple of float
        Operations per second of a product of large matrices, for each round.
    memory : int, optional
        Peak memory of a call in bytes, without its arguments.
    copies : tuple of float
        Bytes per second, read and written, of a copy of keys and values, for each round; of one query alone.
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
    copies: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.seconds)

    @property
    def share(self) -> float | None:
        """Operations per second relative to a product of large matrices in the same rounds."""
        if not self.products:
            return None
        pairs = zip(self.seconds, self.products, strict=True)
        return statistics.median(self.problem.flops / seconds / rate for seconds, rate in pairs)

    @property
    def bandwidth(self) -> float | None:
        """Bytes of keys and values that a call reads per second, relative to a copy of them in the same rounds."""
        if not self.copies:
            return None
        pairs = zip(self.seconds, self.copies, strict=True)
        return statistics.median(self.problem.cache_nbytes / seconds / rate for seconds, rate in pairs)


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
    """Write the environment and all samples; compressed, where the name ends with ``.gz``."""
    rows = [as_row(each) for each in measurements]
    document = json.dumps({"environment": environment, "measurements": rows}, indent=1) + "\n"
    is_packed = path.suffix == ".gz"
    write_file(path, gzip.compress(document.encode(), mtime=0) if is_packed else document.encode())


def read_json(path: Path, show: Callable[..., Any] = lambda *found: None) -> tuple[list[Measurement], dict[str, Any]]:
    """Read what `write_json` wrote. Raise FileError when the file cannot be read, or holds what cannot be shown."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (EOFError, OSError, UnicodeDecodeError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"expected a file of bench --json; got {path}: {reason}") from error
    try:
        document = json.loads(text)
        found, about = [of_row(row) for row in document["measurements"]], document["environment"]
        show(found, about)
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise FileError(f"expected a file of bench --json; got {path}, which holds something else") from error
    return found, about


def as_row(measurement: Measurement) -> dict[str, Any]:
    """Turn a measurement into a row of JSON."""
    row = dataclasses.asdict(measurement)
    return row | {name: [float(f"{each:.4g}") for each in row[name]] for name in SAMPLES}


def of_row(row: Mapping[str, Any]) -> Measurement:
    """Read a measurement from a row of JSON."""
    samples = {name: tuple(row.get(name, ())) for name in SAMPLES}
    problem = Problem.of_row(row["problem"])
    return Measurement(**{**row, **samples, "problem": problem, "candidate": Candidate(**row["candidate"])})
