"""Tables of measurements, for a terminal or in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from attention_benchmark.candidate import Candidate
from attention_benchmark.measurement import Measurement, fastest_peers, quartiles, ratio
from attention_benchmark.problem import DOCUMENT, WINDOW, Problem
from attention_workers.machine import environment as environment_of_machine

NOTHING = "–"
IN_BRACKETS = "In brackets: how many times as long as the fastest peer of the same framework."
COMMON = "F.scaled_dot_product_attention"
DETAILS = ("framework", "mode", "candidate", "median", "quartiles", "× peer", "× PyTorch", "memory", "first")
DIRECTION = {"forward": "Attention, forward", "fwd+bwd": "Attention, forward and backward"}
LEGEND = (
    "× peer: how many times as long as the fastest peer of the same framework, round by round. × PyTorch: as long as "
    f"`{COMMON}` in its own process. Memory: peak memory, without the arguments. First: the first call, compiled."
)


class TextTable(NamedTuple):
    """A table: title, headings, rows, and notes below it."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]


def overviews(measurements: Sequence[Measurement]) -> list[TextTable]:
    """Tables with a row for each candidate and a column for each problem, by direction."""
    directions = dict.fromkeys(each.problem.direction for each in measurements)
    return [_overview(measurements, each) for each in directions]


def _overview(measurements: Sequence[Measurement], direction: str) -> TextTable:
    chosen = [each for each in measurements if each.problem.direction == direction]
    problems = list(dict.fromkeys(each.problem for each in chosen))
    peers = fastest_peers(chosen)
    rows = []
    for candidate in dict.fromkeys(each.candidate for each in chosen):
        by_problem = {each.problem: each for each in chosen if each.candidate == candidate}
        rows.append((*_name(candidate), *(_overview_cell(by_problem.get(problem), peers) for problem in problems)))
    headings = ("framework", "mode", "candidate", *(f"{_shape(each)} {_mask(each)}" for each in problems))
    return TextTable(DIRECTION[direction], headings, rows, [IN_BRACKETS, *_reasons(chosen)])


def _overview_cell(measurement: Measurement | None, peers: Mapping[tuple[Problem, str], Measurement]) -> str:
    if measurement is None or not measurement.seconds:
        return NOTHING if measurement is None else measurement.outcome
    time = duration(measurement.median)
    peer = peers.get((measurement.problem, measurement.candidate.framework))
    return time if peer is None else f"{time} ({ratio(measurement, peer):.2f})"


def details(measurements: Sequence[Measurement]) -> list[TextTable]:
    """A table for each problem, with all statistics of each candidate."""
    return [
        _detail(problem, [each for each in measurements if each.problem == problem])
        for problem in dict.fromkeys(each.problem for each in measurements)
    ]


def _detail(problem: Problem, measurements: Sequence[Measurement]) -> TextTable:
    title = f"{DIRECTION[problem.direction]}: {_shape(problem)}, {_mask(problem)}, {problem.dtype}, {problem.device}"
    common = next((each for each in measurements if each.candidate.name == COMMON), None)
    peers = fastest_peers(measurements)
    rows = [(*_name(each.candidate), *_detail_cells(each, peers, common)) for each in measurements]
    return TextTable(title, DETAILS, rows, _reasons(measurements))


def _detail_cells(
    each: Measurement, peers: Mapping[tuple[Problem, str], Measurement], common: Measurement | None
) -> tuple[str, ...]:
    if not each.seconds:
        return (each.outcome, *[NOTHING] * 5)
    peer = peers.get((each.problem, each.candidate.framework))
    return (
        duration(each.median),
        " – ".join(map(duration, quartiles(each.seconds))),
        NOTHING if peer is None else f"{ratio(each, peer):.2f}",
        NOTHING if common is None or not common.seconds else f"{each.median / common.median:.2f}",
        NOTHING if each.memory is None else size(each.memory),
        NOTHING if each.first is None else duration(each.first),
    )


def _reasons(measurements: Iterable[Measurement]) -> list[str]:
    """A line for each reason why a candidate was not measured."""
    named: dict[str, list[str]] = {}
    for each in measurements:
        if each.reason:
            named.setdefault(f"{each.outcome}: {each.reason}", []).append(" ".join(_name(each.candidate)))
    return [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in named.items()]


def _name(candidate: Candidate) -> tuple[str, str, str]:
    return (
        candidate.framework,
        candidate.mode,
        candidate.name if candidate.is_peer else f"attention_core {candidate.name}",
    )


def _shape(problem: Problem, queries: str = "{}×") -> str:
    """Batch × heads × length × width; key/value heads and queries stand apart where these are others."""
    batch, heads, length, width = map(str, problem.shape)
    heads = heads if problem.group == 1 else f"{heads}/{problem.kv_heads}"
    length = length if problem.num_queries == problem.shape[2] else queries.format(problem.queries) + length
    return "×".join((batch, heads, length, width))


def _mask(problem: Problem) -> str:
    numbers = {
        "window": [problem.window] if problem.window != WINDOW else [],
        "packed": [problem.document] if problem.document != DOCUMENT else [],
        "padded": problem.key_lengths,
        "padded-causal": problem.key_lengths,
    }
    return " ".join((problem.mask, *map(str, numbers.get(problem.mask, ()))))


def duration(seconds: float) -> str:
    """Format a time with three digits and a unit."""
    unit, factor = next((each for each in (("s", 1.0), ("ms", 1e3)) if seconds * each[1] >= 1), ("µs", 1e6))
    return f"{_three_digits(seconds * factor)} {unit}"


def size(count: float) -> str:
    """Format bytes with three digits and a unit."""
    unit, factor = next((each for each in (("GiB", 2**30), ("MiB", 2**20)) if count >= each[1]), ("KiB", 2**10))
    return f"{_three_digits(count / factor)} {unit}"


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def rich_table(grid: TextTable) -> Table:
    """Make a table for the terminal."""
    table = Table(title=grid.title, title_justify="left", header_style="bold", caption_justify="left")
    for column, heading in enumerate(grid.headings):
        table.add_column(heading, justify="left" if column < 3 else "right")
    for row in grid.rows:
        table.add_row(*row, style="bold" if row[2].startswith("attention_core") else "")
    return table


def environment(versions: Mapping[str, str], threads: int) -> dict[str, Any]:
    """Describe date, machine and the versions of all libraries."""
    about = environment_of_machine()
    installed = {"attention-core": about.pop("attention-core")}
    return {**about, "threads": threads, "versions": {**installed, **versions}}
