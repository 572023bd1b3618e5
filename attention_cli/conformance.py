"""The command ``conformance``: what to run, and where to write what came of it."""

from __future__ import annotations

import fnmatch
import itertools
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from attention_cli.backends import chosen_backends, load
from attention_cli.terminal import Many, check_known, console, refusal
from attention_conformance import report
from attention_conformance.cases import CASES
from attention_conformance.cases.case import Case
from attention_conformance.cases.identical import Identical
from attention_conformance.problem import DTYPES
from attention_conformance.run import identical as bits
from attention_conformance.run.bert import ModelError
from attention_conformance.run.implementations import IMPLEMENTATIONS
from attention_conformance.run.libraries import devices_of
from attention_conformance.run.model import load_model
from attention_conformance.run.processes import Order, Plan, Worker, execute, work
from attention_conformance.run.result import Result
from attention_conformance.vectors import published, published_model

__all__ = ["conformance"]

AnyCase = TypeVar("AnyCase", Case, Identical)
CPUS = os.cpu_count() or 1


def conformance(
    backend: Annotated[Many, typer.Option(help="A backend; repeatable. By default all that are installed.")] = None,
    device: Annotated[Many, typer.Option(help="A device; repeatable. By default all that hold values.")] = None,
    dtype: Annotated[Many, typer.Option(help="A floating-point type; repeatable. By default all.")] = None,
    mode: Annotated[Many, typer.Option(help="A mode, such as eager or compiled; repeatable. By default all.")] = None,
    implementation: Annotated[
        Many, typer.Option(help="dense, blockwise or fused; repeatable. By default all three, less where compiled.")
    ] = None,
    case: Annotated[Many, typer.Option(help="Cases by name, * and ? allowed; repeatable. By default all.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A directory with an encoder of BERT's type, to be run as well, as the case model."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write environment and results to this file.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write results to this file as JUnit XML.")] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Backends at a time, each in a process; 0: all in this one.")] = CPUS,
    list_: Annotated[bool, typer.Option("--list", help="List the cases and what they show, and run none.")] = False,
    identical: Annotated[
        bool, typer.Option("--identical", help="Compare bits instead, in reproducible arithmetic, with published ones.")
    ] = False,
) -> None:
    """Run the catalogue of cases, and compare each result with an oracle of higher precision.

    With --identical, run another catalogue in reproducible arithmetic, in every mode of every backend, and compare the
    SHA-256 of each result with the published one.

    The exit status is 0 if all results keep their bounds, 1 if not (or if nothing could be run), and 2 if the command
    cannot be run as given.
    """
    if identical:
        refused = {"dtype": dtype, "implementation": implementation, "junit": junit}
        _identical(backend, device, mode, case, model=model, json=json, jobs=jobs, list_=list_, refused=refused)
        return
    cases = _chosen_cases(case, CASES)
    if list_:
        _list(
            ("case", "line", "shows", "dtypes"),
            ((c.name, str(c.line or "-"), c.shows, " ".join(c.dtypes)) for c in cases),
        )
        return
    for path in (json, junit):
        _check_writable(path)
    names = chosen_backends(backend)
    check_known("dtype", dtype, DTYPES)
    check_known("implementation", implementation, IMPLEMENTATIONS)
    _check_places(names, device, mode)
    _check_model(model)
    options = (device, dtype, mode, implementation)
    devices, dtypes, modes, implementations = (tuple(each) if each else None for each in options)
    chosen = tuple(each.name for each in cases)
    orders = [Order(name, chosen, devices, dtypes, modes, implementations, model) for name in names]
    results, versions = _run_all(orders, jobs)
    _show(results)
    if json:
        report.write_json(json, results, report.environment(versions))
    if junit:
        report.write_junit(junit, results)
    typer.echo(report.summary(results))
    holds = {result.passed for result in results}
    raise typer.Exit(False in holds or True not in holds)


def _identical(
    backend: Many,
    device: Many,
    mode: Many,
    case: Many,
    model: Path | None,
    json: Path | None,
    jobs: int,
    list_: bool,
    refused: Mapping[str, Any],
) -> None:
    """Run the cases of which all ways must give the same bits."""
    for option, value in refused.items():
        if value:
            raise refusal(f"expected no --{option} with --identical; got one")
    _check_model(model)
    cases = _chosen_cases(case, bits.catalogue(model))
    if list_:
        _list(("case", "shows", "dtype"), ((each.name, each.shows, each.dtype) for each in cases))
        return
    _check_writable(json)
    names = chosen_backends(backend)
    _check_places(names, device, mode)
    devices, modes = (tuple(each) if each else None for each in (device, mode))
    chosen = tuple(each.name for each in cases)
    orders = [Order(name, chosen, devices, modes=modes, model=model) for name in names]
    results, versions = _run_all(orders, jobs, bits.work)
    judged = bits.verdicts(chosen, results, published() | published_model(model))
    screen = console()
    screen.print(bits.table(judged))
    complaints = [line for each in judged for line in each.complaints]
    for line in complaints:
        screen.print(line, style="red", highlight=False, soft_wrap=True)
    if json:
        bits.write_json(json, judged, report.environment(versions))
    differing = sum(bool(each.complaints) for each in judged)
    typer.echo(f"{len(judged) - differing} identical, {differing} not, {len(chosen) - len(judged)} not run")
    raise typer.Exit(bool(complaints) or not judged)


def _run_all(
    orders: Sequence[Order], jobs: int, worker: Worker = work
) -> tuple[list[Result], dict[str, dict[str, str]]]:
    """Carry out the orders under progress bars on the standard error stream; results keep the order of the orders."""
    results: dict[str, list[Result]] = {order.backend: [] for order in orders}
    versions: dict[str, dict[str, str]] = {}
    columns = (TextColumn("{task.description:<54}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    longest_first = list(reversed(orders))  # the compiler that takes longest belongs to the last of them
    with Progress(*columns, console=console(stderr=True)) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about themselves
        bars = {order.backend: progress.add_task(order.backend, total=None, start=False) for order in longest_first}
        for message in execute(longest_first, jobs, worker):
            if isinstance(message, Plan):
                versions[message.backend] = message.versions
                progress.start_task(bars[message.backend])
                progress.update(bars[message.backend], total=message.trials)
                continue
            way = f"{message.backend} {message.mode} {message.implementation}".rstrip()
            progress.update(bars[message.backend], description=f"{way}: {message.case}")
            if isinstance(message, Result):
                results[message.backend].append(message)
                progress.advance(bars[message.backend])
    return list(itertools.chain(*results.values())), {name: versions[name] for name in results if name in versions}


def _show(results: Sequence[Result]) -> None:
    screen = console()
    for table in report.result_tables(results, screen.width):
        screen.print(table)
    screen.print(report.LEGEND, style="dim")
    if any(result.case == "model" for result in results):
        screen.print(report.model_table(results))
    for line in report.reasons(results):
        screen.print(line, style="dim", highlight=False, soft_wrap=True)
    for line in report.failures(results):
        screen.print(line, style="red", highlight=False, soft_wrap=True)


def _list(headings: Iterable[str], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(header_style="bold")
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def _chosen_cases(patterns: Many, cases: Sequence[AnyCase]) -> list[AnyCase]:
    for pattern in patterns or ():
        if not fnmatch.filter([case.name for case in cases], pattern):
            raise refusal(f"expected a case out of those of --list; got {pattern!r}, which none matches")
    return [case for case in cases if not patterns or any(fnmatch.fnmatch(case.name, each) for each in patterns)]


def _check_places(names: Iterable[str], devices: Many, modes: Many) -> None:
    if devices or modes:  # only the libraries know which there are
        loaded = load(names)
        check_known("device", devices, dict.fromkeys(each for backend in loaded for each in devices_of(backend)))
        check_known("mode", modes, dict.fromkeys(each for backend in loaded for each in backend.modes))


def _check_model(directory: Path | None) -> None:
    try:
        if directory is not None:
            load_model(directory)
    except ModelError as error:
        raise refusal(str(error)) from error


def _check_writable(path: Path | None) -> None:
    if path is None:
        return
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise refusal(f"expected a file that can be written; got {path}: {error.strerror}") from error
