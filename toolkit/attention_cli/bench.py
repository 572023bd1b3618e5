"""The command ``bench``: chooses what to measure, and writes the results."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.status import Status

from attention_benchmark import report
from attention_benchmark.candidate import CANDIDATES, FRAMEWORKS, Candidate
from attention_benchmark.measurement import Measurement, write_json
from attention_benchmark.order import Order
from attention_benchmark.problem import (
    DIRECTIONS,
    MASKS,
    PRESETS,
    Problem,
    default_problems,
)
from attention_benchmark.processes import installed, measurements_of, memory_of
from attention_benchmark.reference import TOLERANCE
from attention_cli.terminal import Many, check_file, check_known, refusal
from attention_workers.memory import available

if TYPE_CHECKING:
    from attention_cli.app import Bench


UNKNOWN = 2**40
"""Bytes of memory, where the system does not tell."""


def bench(options: Bench, /) -> None:
    """Measure; print and write what came of it."""
    for name, values, known in (
        ("backend", options.backend, FRAMEWORKS),
        ("preset", options.preset, PRESETS),
        ("mask", options.mask, MASKS),
        ("direction", options.direction, DIRECTIONS),
        ("dtype", [options.dtype], TOLERANCE),
    ):
        check_known(name, values, list(known))
    for name, number in (("seconds", options.seconds), ("max-seconds", options.max_seconds)):
        if not 0 <= number < math.inf:
            raise refusal(f"expected {name} as a number from 0; got {number}")
    check_file(options.json)
    failures: list[str] = []
    without: dict[str, str] = {}
    order = Order(
        "",
        (),
        (),
        seconds=options.seconds,
        rounds=(options.rounds, options.rounds) if options.rounds else None,
        limit=options.max_seconds,
        threads=options.threads,
    )
    orders = _orders(order, _problems(options), _frameworks(options.backend), _candidates(options.candidate))
    measurements, about = list[Measurement](), report.environment({}, options.threads)
    for results, versions in _measured(orders, options.memory, failures, without):
        measurements += results
        about["versions"] |= versions
        if options.json:  # an interrupted run leaves what it has measured
            write_json(options.json, measurements, about)
    has = "; ".join(f"{framework} has {devices}" for framework, devices in without.items())
    if without and not measurements and not failures:
        raise refusal(f"expected a device of some framework; got {options.device!r}, and {has}")
    if without:
        typer.echo(f"without {options.device!r}, and left out: {has}", err=True)
    _show(measurements, options.verbose)
    for failure in failures:
        typer.echo(failure, err=True)
    raise typer.Exit(bool(failures) or any(each.outcome == "wrong" for each in measurements))


def _problems(options: Bench) -> list[Problem]:
    """Choose from the default problems or those of presets, or combine shapes, masks and directions."""
    dtype, device = options.dtype, options.device
    masks, directions = options.mask or MASKS, options.direction or DIRECTIONS
    if options.preset:
        chosen = [each for name in options.preset for each in PRESETS[name]]
        problems = [Problem(**{"dtype": dtype, **each}, device=device) for each in chosen]
    elif options.shape is None:
        problems = default_problems(dtype, device)
    else:
        problems = [
            Problem(**fields, mask=kind, direction=direction, dtype=dtype, device=device)
            for kind in options.mask or ["full", "causal"]
            for fields in map(_shape, options.shape)
            for direction in DIRECTIONS
        ]
    fitting = [each for each in problems if each.mask in masks and each.direction in directions]
    if not fitting:
        raise refusal("expected a mask that the default shapes have; name a --shape")
    _check_sizes(fitting)
    return fitting


def _shape(text: str) -> dict[str, Any]:
    """The sizes of a problem, with the numbers of KV heads and of queries where it tells these."""
    size = r"([1-9]\d{0,17})"
    found = re.fullmatch(rf"{size},{size}(?:on{size})?,(?:{size}x)?{size},{size}", text, re.ASCII)
    if found is None:
        raise refusal(f"expected shape as batch,heads,length,width, or 4,8on2,1x512,64; got {text[:80]!r}")
    batch, heads, kv_heads, queries, length, width = (int(each or 0) for each in found.groups())
    if heads % (kv_heads or heads) or (queries or length) > length:
        raise refusal(f"expected KV heads that divide heads, and no more queries than keys; got {text!r}")
    return {"shape": (batch, heads, length, width), "kv_heads": kv_heads or None, "queries": queries or None}


def _frameworks(names: Many) -> list[str]:
    for name in names or ():
        if name not in installed():
            raise refusal(f"{name} is not installed")
    return [name for name in installed() if not names or name in names]


def _candidates(patterns: Many) -> list[Candidate]:
    def fits(candidate: Candidate, pattern: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for name in (candidate.name, candidate.key))

    for pattern in patterns or ():
        if not any(fits(each, pattern) for each in CANDIDATES):
            raise refusal(f"expected a candidate; got {pattern!r}, which none matches")
    return [each for each in CANDIDATES if not patterns or any(fits(each, pattern) for pattern in patterns)]


def _orders(
    order: Order, problems: Sequence[Problem], frameworks: Sequence[str], candidates: Sequence[Candidate]
) -> Iterator[Order]:
    for framework in frameworks:
        chosen = [each for each in candidates if each.framework == framework]
        fitting = tuple(problem for problem in problems if any(each.takes(problem) for each in chosen))
        if fitting:
            keys = tuple(each.key for each in chosen)
            yield dataclasses.replace(order, framework=framework, problems=fitting, candidates=keys)


def _measured(
    orders: Iterator[Order], memory: bool, failures: list[str], without: dict[str, str]
) -> Iterator[tuple[list[Measurement], dict[str, str]]]:
    """Carry out orders one after the other: processes at the same time would disturb each other."""
    with Console(stderr=True).status("") as status:
        for order in orders:
            versions: dict[str, str] = {}
            try:
                results = []
                with contextlib.closing(measurements_of(order)) as messages:
                    for message in messages:
                        if isinstance(message, Measurement):
                            results.append(message)
                            if not memory:
                                yield results[-1:], versions
                        elif "devices" in message:  # those that it has, and none of the kind that is asked for
                            without[order.framework] = ", ".join(message["devices"])
                        elif "versions" in message:
                            versions |= message["versions"]
                        else:
                            status.update(f"time: {message['started'][0]}")
            except RuntimeError as error:
                failures.append(str(error))
                continue
            if memory and order.framework not in without:
                yield _with_memory(order, results, status, failures), versions


def _with_memory(
    order: Order, results: Sequence[Measurement], status: Status, failures: list[str]
) -> list[Measurement]:
    known = {(each.candidate, each.problem): each for each in results}
    for candidate in dict.fromkeys(each.candidate for each in results if each.seconds):
        status.update(f"memory: {candidate.key}")
        timed = [each for each in results if each.candidate == candidate and each.seconds]
        try:
            with contextlib.closing(memory_of(order, timed)) as measured:
                known |= {(each.candidate, each.problem): each for each in measured}
        except RuntimeError as error:
            failures.append(f"{candidate.key}: {error}")
    return list(known.values())


def _show(measurements: Sequence[Measurement], verbose: bool) -> None:
    console = Console(markup=False)
    if not console.is_terminal:
        console.width = 200
    for grid in [*report.overviews(measurements), *(report.details(measurements) if verbose else ())]:
        console.print(report.rich_table(grid))
        for note in grid.notes:
            console.print(note, style="dim", highlight=False, soft_wrap=True)
    if verbose:
        console.print(report.LEGEND, style="dim")


def _check_sizes(problems: Sequence[Problem]) -> None:
    """Refuse arrays that do not fit into memory before anything is drawn."""
    free = available() or UNKNOWN
    for each in problems:
        if each.nbytes > free:
            shape = ",".join(map(str, each.shape))
            needed, there = report.size(each.nbytes), report.size(free)
            raise refusal(f"expected a shape whose arrays fit into {there}; got {shape}, whose arrays take {needed}")
