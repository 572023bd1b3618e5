"""The command: what to measure, and where to write what came of it."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status

from attention_benchmark import report
from attention_benchmark.candidate import CANDIDATES, FRAMEWORKS, Candidate
from attention_benchmark.measurement import Measurement, read_json, write_json
from attention_benchmark.order import Order
from attention_benchmark.problem import DIRECTIONS, MASKS, OPERATIONS, SHAPES, Problem, default_problems
from attention_benchmark.processes import installed, measurements_of, memory_of
from attention_benchmark.reference import TOLERANCE

__all__ = ["bench"]

Many = list[str] | None


def bench(
    backend: Annotated[
        Many, typer.Option(help="A framework, onnxruntime among them; repeatable. By default all.")
    ] = None,
    candidate: Annotated[
        Many, typer.Option("--candidate", "--implementation", help="Candidates by name, * allowed; repeatable.")
    ] = None,
    operation: Annotated[
        Many, typer.Option(help=f"{', '.join(OPERATIONS)}; repeatable. By default the first two.")
    ] = None,
    shape: Annotated[Many, typer.Option(help="Batch, heads, length, head dimension, as in 4,12,512,64.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Lengths of a series, as in 512,1024,2048, for plots.")] = None,
    mask: Annotated[Many, typer.Option(help=f"{', '.join(MASKS)}; repeatable.")] = None,
    direction: Annotated[Many, typer.Option(help="forward, or both; repeatable. By default each of them.")] = None,
    dtype: Annotated[str, typer.Option(help="A floating-point type.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, or what devices' names start with, such as cuda.")] = "cpu",
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of samples. By default 5 to 30.")] = None,
    seconds: Annotated[float, typer.Option(help="What the samples of a candidate may take, by default.")] = 2.0,
    limit: Annotated[float, typer.Option(help="Skip calls that would take more than these seconds.")] = 60.0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each framework.")] = 2,
    memory: Annotated[bool, typer.Option(help="Measure peak memory as well, each candidate in a process.")] = True,
    json: Annotated[Path | None, typer.Option(help="Write the environment and all samples to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this file.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Draw series of lengths into this directory.")] = None,
    png: Annotated[bool, typer.Option("--png", help="Draw PNG and not SVG.")] = False,
    details: Annotated[bool, typer.Option("--details", help="Print a table for every single problem, too.")] = False,
    read: Annotated[Path | None, typer.Option(help="Measure nothing: take what --json wrote.")] = None,
) -> None:
    """Time all implementations and the attentions of the frameworks, after comparing their results.

    The exit status is 1 if a candidate computes something wrong, or a process failed, and 2 if the command cannot be
    run as given.
    """
    for name, given, known in (
        ("backend", backend, FRAMEWORKS),
        ("operation", operation, OPERATIONS),
        ("mask", mask, MASKS),
        ("direction", direction, DIRECTIONS),
        ("dtype", [dtype], TOLERANCE),
    ):
        _check_known(name, given, list(known))
    for path in (json, markdown):
        _check_writable(path)
    failures: list[str] = []
    if read is not None:
        measurements, about = read_json(read)
    else:
        order = Order(
            "", (), (), seconds=seconds, rounds=(rounds, rounds) if rounds else None, limit=limit, threads=threads
        )
        problems = _problems(dtype, device, shape, lengths, mask, direction, operation)
        orders = _orders(order, problems, _frameworks(backend), _candidates(candidate))
        measurements, about = [], report.environment({}, threads)
        for found, versions in _measured(orders, memory, failures):
            measurements += found
            about["versions"] |= versions
            if json:  # a long run that is broken off leaves what it has
                write_json(json, measurements, about)
    if markdown:
        markdown.write_text(report.markdown(measurements, about), encoding="utf-8")
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
    dtype: str, device: str, shapes: Many, lengths: str | None, masks: Many, directions: Many, operations: Many
) -> list[Problem]:
    """The default ones as far as they are asked for; or all masks asked for on the shapes asked for."""
    if shapes is None and lengths is None:
        problems = default_problems(dtype, device)
    else:
        given = [_shape(each) for each in shapes or ()]
        if lengths is not None:
            batch, heads, _, width = given[-1] if given else SHAPES[-1]
            given = [(batch, heads, length, width) for length in sorted(_integers("lengths", lengths))]
        problems = [
            Problem(each, kind, direction, dtype, device, operation)
            for operation in operations or ["attention"]
            for kind in masks or ["full", "causal"]
            for each in given
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
    return chosen


def _shape(text: str) -> tuple[int, int, int, int]:
    numbers = _integers("shape", text)
    if len(numbers) != 4:
        raise _refusal(f"expected shape as batch,heads,length,width; got {text!r}")
    batch, heads, length, width = numbers
    return batch, heads, length, width


def _integers(option: str, text: str) -> list[int]:
    if not all(each.isdecimal() and int(each) for each in text.split(",")):
        raise _refusal(f"expected {option} as positive integers separated by commas; got {text!r}")
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
    orders: Iterator[Order], memory: bool, failures: list[str]
) -> Iterator[tuple[list[Measurement], dict[str, str]]]:
    """Carry out orders one after the other, since what runs at the same time would be measured too."""
    with Console(stderr=True).status("") as status:
        for order in orders:
            versions: dict[str, str] = {}
            try:
                found = list(_timed(order, versions, status))
            except RuntimeError as error:
                failures.append(str(error))
                continue
            yield _with_memory(order, found, status, failures) if memory else found, versions


def _timed(order: Order, versions: dict[str, str], status: Status) -> Iterator[Measurement]:
    for message in measurements_of(order):
        if isinstance(message, Measurement):
            yield message
        elif "versions" in message:
            versions |= message["versions"]
        else:
            status.update(f"time: {message['started'][0]}")


def _with_memory(order: Order, found: Sequence[Measurement], status: Status, failures: list[str]) -> list[Measurement]:
    known = {(each.candidate, each.problem): each for each in found}
    for candidate in dict.fromkeys(each.candidate for each in found if each.seconds):
        status.update(f"memory: {candidate.key}")
        timed = [each for each in found if each.candidate == candidate and each.seconds]
        try:
            known |= {(each.candidate, each.problem): each for each in memory_of(order, timed)}
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


def _check_known(option: str, given: Many, known: Sequence[str]) -> None:
    for name in given or ():
        if name not in known:
            raise _refusal(f"expected a {option} out of {', '.join(known)}; got {name!r}")


def _check_writable(path: Path | None) -> None:
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        raise _refusal(f"expected a file that can be written; got {path}: {error.strerror}") from error


def _refusal(message: str) -> typer.Exit:
    """Say in one line why the command cannot be run as given."""
    typer.echo(f"attention-core: {message}", err=True)
    return typer.Exit(2)
