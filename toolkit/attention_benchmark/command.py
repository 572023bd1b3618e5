"""The command: chooses what to measure, and writes the results."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import importlib
import importlib.util
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.status import Status

from attention_benchmark import report
from attention_benchmark.candidate import CANDIDATES, FRAMEWORKS, Candidate
from attention_benchmark.measurement import Measurement, read_json, write_json
from attention_benchmark.memory import available
from attention_benchmark.order import Order
from attention_benchmark.problem import (
    DIRECTIONS,
    MASKS,
    OPERATIONS,
    PRESETS,
    SHAPES,
    WINDOW,
    Problem,
    default_problems,
    shortened,
)
from attention_benchmark.processes import Message, installed, measurements_of, memory_of
from attention_benchmark.reference import TOLERANCE
from attention_files.writing import FileError, check_writable, write_file

__all__ = ["bench"]

Many = list[str] | None


class NoDeviceError(Exception):
    """A framework has no device of the kind that is asked for, but those in the message."""


UNKNOWN = 2**40
"""Bytes of memory, where the system does not tell."""


def bench(
    *,
    backend: Many,
    candidate: Many,
    operation: Many,
    shape: Many,
    preset: Many,
    kv_heads: int | None,
    queries: str | None,
    offset: int | None,
    key_lengths: str | None,
    window: int,
    lengths: str | None,
    mask: Many,
    direction: Many,
    dtype: str,
    device: str,
    rounds: int | None,
    seconds: float,
    limit: float,
    threads: int,
    memory: bool,
    json: Path | None,
    markdown: Path | None,
    plots: Path | None,
    png: bool,
    details: bool,
    read: Path | None,
    foreign: Candidate | None = None,
) -> None:
    """Measure, or read measurements; print and write them. A foreign candidate is measured among its library's."""
    for name, values, known in (
        ("backend", backend, FRAMEWORKS),
        ("operation", operation, OPERATIONS),
        ("preset", preset, PRESETS),
        ("mask", mask, MASKS),
        ("direction", direction, DIRECTIONS),
        ("dtype", [dtype], TOLERANCE),
    ):
        _check_known(name, values, list(known))
    for name, number in (("seconds", seconds), ("limit", limit)):
        if not 0 <= number < math.inf:
            raise _refusal(f"expected {name} as a number from 0; got {number}")
    with _refusing_files():
        for path in (json, markdown):
            if path is not None:
                check_writable(path)
    _check_plots(plots)
    failures: list[str] = []
    if read is not None:
        with _refusing_files():
            measurements, about = read_json(read)
    else:
        order = Order(
            "",
            (),
            (),
            foreign=(foreign,) if foreign else (),
            seconds=seconds,
            rounds=(rounds, rounds) if rounds else None,
            limit=limit,
            threads=threads,
        )
        problems = _problems(
            dtype,
            device,
            shapes=shape,
            lengths=lengths,
            masks=mask,
            directions=direction,
            operations=operation,
            presets=preset,
        )
        problems = _with_cache(problems, kv_heads, queries, offset=offset, key_lengths=key_lengths, window=window)
        names = [foreign.framework] if foreign else backend
        orders = _orders(order, problems, _frameworks(names), [*_candidates(candidate), *order.foreign])
        measurements, about = [], report.environment({}, threads)
        without: dict[str, str] = {}
        for results, versions in _measured(orders, memory, failures, without):
            measurements += results
            about["versions"] |= versions
            if json:  # an interrupted run leaves what it has measured
                write_json(json, measurements, about)
        has = "; ".join(f"{framework} has {devices}" for framework, devices in without.items())
        if without and not measurements and not failures:
            raise _refusal(f"expected a device of some framework; got {device!r}, and {has}")
        if without:
            typer.echo(f"without {device!r}, and left out: {has}", err=True)
    if markdown:
        write_file(markdown, report.markdown(measurements, about).encode())
    _show(measurements, details)
    if plots:
        written = importlib.import_module("attention_benchmark.plots").write_plots(
            plots, measurements, "png" if png else "svg"
        )
        typer.echo(f"{len(written)} figures in {plots}")
    for failure in failures:
        typer.echo(failure, err=True)
    raise typer.Exit(bool(failures) or any(each.outcome == "wrong" for each in measurements))


def _problems(
    dtype: str,
    device: str,
    /,
    *,
    shapes: Many,
    lengths: str | None,
    masks: Many,
    directions: Many,
    operations: Many,
    presets: Many,
) -> list[Problem]:
    """Choose from the default problems or those of presets, or combine shapes, masks and directions."""
    if presets:
        problems = [Problem(**{"dtype": dtype, **each}, device=device) for name in presets for each in PRESETS[name]]
        if lengths is not None:
            problems = list(
                dict.fromkeys(shortened(each, most) for most in _integers("lengths", lengths) for each in problems)
            )
    elif shapes is None and lengths is None:
        problems = default_problems(dtype, device)
    else:
        dims = [_shape(each) for each in shapes or ()]
        if lengths is not None:
            batch, heads, _, width = dims[-1] if dims else SHAPES[-1]
            dims = [(batch, heads, length, width) for length in sorted(_integers("lengths", lengths))]
        problems = [
            Problem(each, kind, direction, dtype=dtype, device=device, operation=operation)
            for operation in operations or ["attention"]
            for kind in masks or ["full", "causal"]
            for each in dims
            for direction in DIRECTIONS
        ]
    chosen = [
        each
        for each in problems
        if each.mask in (masks or MASKS)
        and each.direction in (directions or DIRECTIONS)
        and each.operation in (operations or OPERATIONS)
    ]
    if not chosen:
        raise _refusal("expected a mask and an operation that the default shapes have; name a --shape")
    for operation, known in {"multi_head": ("full", "causal"), "linear": ("full",)}.items():
        if any(each.operation == operation and each.mask not in known for each in chosen):
            raise _refusal(f"expected mask {' or '.join(known)} with {operation}; got another")
    _check_sizes(chosen)
    return chosen


def _with_cache(problems: list[Problem], kv_heads: int | None, queries: str | None, /, **options: Any) -> list[Problem]:
    """The problems with other numbers of key/value heads and queries, and fields of masks, as far as they are there."""
    fields = {name: value for name, value in options.items() if value is not None}
    if "key_lengths" in fields:
        fields["key_lengths"] = tuple(_integers("key-lengths", fields["key_lengths"]))
    if fields.get("window") == WINDOW:
        del fields["window"]  # that of a preset
    if kv_heads is not None:
        fields["kv_heads"] = kv_heads
    counts: list[dict[str, Any]] = [{}] if queries is None else [{"queries": n} for n in _integers("queries", queries)]
    if not fields and queries is None:
        return problems
    found = [dataclasses.replace(each, **fields, **count) for each in problems for count in counts]
    for each in found:
        if each.operation != "attention" or each.shape[1] % (each.kv_heads or 1) or each.num_queries > each.shape[2]:
            raise _refusal("expected attention, key/value heads that divide heads, and no more queries than keys")
        if not 0 <= each.ahead <= each.shape[2] - each.num_queries:
            raise _refusal(f"expected an offset in 0..{each.shape[2] - each.num_queries}; got {each.offset}")
    return found


def _shape(text: str) -> tuple[int, int, int, int]:
    numbers = _integers("shape", text)
    if len(numbers) != 4:
        raise _refusal(f"expected shape as batch,heads,length,width; got {text!r}")
    batch, heads, length, width = numbers
    return batch, heads, length, width


def _integers(option: str, text: str) -> list[int]:
    if not all(each.isdecimal() and len(each) < 19 and int(each) for each in text.split(",")):
        raise _refusal(f"expected {option} as positive integers separated by commas; got {text[:80]!r}")
    return [int(each) for each in text.split(",")]


def _frameworks(names: Many) -> list[str]:
    for name in names or ():
        if name not in installed():
            raise _refusal(f"{name} is not installed")
    return [name for name in installed() if not names or name in names]


def _candidates(patterns: Many) -> list[Candidate]:
    def fits(candidate: Candidate, pattern: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for name in (candidate.name, candidate.key))

    for pattern in patterns or ():
        if not any(fits(each, pattern) for each in CANDIDATES):
            raise _refusal(f"expected a candidate; got {pattern!r}, which none matches")
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
                with contextlib.closing(measurements_of(order)) as messages:
                    timed = _timed(messages, versions, status)
                    if not memory:
                        yield from (([each], versions) for each in timed)
                        continue
                    results = list(timed)
            except NoDeviceError as error:
                without[order.framework] = str(error)
                continue
            except RuntimeError as error:
                failures.append(str(error))
                continue
            yield _with_memory(order, results, status, failures), versions


def _timed(
    messages: Iterable[Message | Measurement], versions: dict[str, str], status: Status
) -> Iterator[Measurement]:
    for message in messages:
        if isinstance(message, Measurement):
            yield message
        elif "devices" in message:
            raise NoDeviceError(", ".join(message["devices"]))
        elif "versions" in message:
            versions |= message["versions"]
        else:
            status.update(f"time: {message['started'][0]}")


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


def _show(measurements: Sequence[Measurement], details: bool) -> None:
    console = Console(markup=False)
    if not console.is_terminal:
        console.width = 200
    for grid in [*report.overviews(measurements), *(report.details(measurements) if details else ())]:
        console.print(report.rich_table(grid))
        for note in grid.notes:
            console.print(note, style="dim", highlight=False, soft_wrap=True)
    if details:
        console.print(report.LEGEND, style="dim")


def _check_known(option: str, names: Many, known: Sequence[str]) -> None:
    for name in names or ():
        if name not in known:
            raise _refusal(f"expected a {option} out of {', '.join(known)}; got {name!r}")


@contextlib.contextmanager
def _refusing_files() -> Iterator[None]:
    try:
        yield
    except FileError as error:
        raise _refusal(str(error)) from error


def _check_plots(directory: Path | None) -> None:
    if directory is None:
        return
    if directory.exists() and not directory.is_dir():
        raise _refusal(f"expected a directory for plots; got {directory}: File exists")
    if importlib.util.find_spec("matplotlib") is None:
        raise _refusal("expected matplotlib for --plots; got none: pip install matplotlib")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refusal(f"expected a directory for plots; got {directory}: {error.strerror}") from error


def _check_sizes(problems: Sequence[Problem]) -> None:
    """Refuse arrays that do not fit into memory before anything is drawn."""
    free = available() or UNKNOWN
    for each in problems:
        if each.nbytes > free:
            shape = ",".join(map(str, each.shape))
            needed, there = report.size(each.nbytes), report.size(free)
            raise _refusal(f"expected a shape whose arrays fit into {there}; got {shape}, whose arrays take {needed}")


def _refusal(message: str) -> typer.Exit:
    """Print in one line which argument is not valid."""
    typer.echo(f"attention-core: {message}", err=True)
    return typer.Exit(2)
