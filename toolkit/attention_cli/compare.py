"""The command ``compare``: two models on the same input, in a process of its own, and where they part."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from attention_cli.terminal import check_file, console, refusal, refusing_files
from attention_conformance.models.comparison import Comparison, PlaceRow, steps
from attention_conformance.models.sides import ComparisonError
from attention_conformance.written.comparison import verdict, write_comparison
from attention_files.writing import write_file

if TYPE_CHECKING:
    from attention_cli.app import Compare

__all__ = ["compare"]

SHOWN = 8
"""Places, and weights, that are shown unless all are asked for."""

START = 60.0
"""Seconds for the start of a process, of which no model is to blame."""


def compare(options: Compare, /) -> None:
    """Compare two models, show what was found, and exit with its status."""
    for path in (options.json, options.html):
        check_file(path)
    asked = (options.first, options.second, options.input)
    step, found = "starting", None
    try:
        with_process = _supervised(asked, options.bound, options.timeout)
        for message in with_process if options.jobs else steps(*asked, bound=options.bound):
            if isinstance(message, Comparison):
                found = message
            else:
                step = message
                if sys.stderr.isatty():
                    typer.echo(f"{step} …", err=True)
    except ComparisonError as error:
        raise refusal(str(error)) from error
    except (EOFError, TimeoutError, SystemExit) as error:  # a model may exit with status 0
        what = f"took more than {options.timeout:g} seconds" if isinstance(error, TimeoutError) else "crashed"
        typer.echo(f"attention-core: expected the end of {step}; got a process that {what}", err=True)
        raise typer.Exit(3) from error
    assert found is not None
    _show(found, options.details)
    with refusing_files():
        if options.json is not None:
            write_file(options.json, (json.dumps(found.json(), indent=1, default=str) + "\n").encode())
        if options.html is not None:
            write_comparison(options.html, found)
    raise typer.Exit(not found.agrees)


def _supervised(asked: tuple[Any, ...], bound: float, timeout: float) -> Iterator[str | Comparison]:
    """The steps in another process, which may die or hang."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, asked, bound), daemon=True)
    process.start()
    theirs.close()
    limit = max(timeout, START)
    try:
        while True:
            if not ours.poll(limit):
                raise TimeoutError
            message, limit = ours.recv(), timeout
            if isinstance(message, Exception):
                raise message
            yield message
            if isinstance(message, Comparison):
                return
    finally:
        process.join(0 if sys.exc_info()[0] else 5)
        process.kill()
        process.join()


def _work(connection: Any, asked: tuple[Any, ...], bound: float) -> None:
    try:
        for message in steps(*asked, bound=bound):
            connection.send(message)
    except ComparisonError as error:
        connection.send(error)


def _show(found: Comparison, details: bool) -> None:
    screen = console()
    for name, versions in zip(found.names, found.versions, strict=True):
        screen.print(f"{name} ({', '.join(f'{each} {number}' for each, number in versions.items())})", highlight=False)
    for name, first, second in found.settings:
        screen.print(f"setting {name}: {first} and {second}", highlight=False)
    screen.print(f"weights: {found.same_weights} with the same bits, {len(found.weights)} others", highlight=False)
    for weight in found.weights if details else found.weights[:SHOWN]:
        screen.print(f"  {weight.name}: {weight.told}", highlight=False, soft_wrap=True)
    table = Table("place", "in the second", "ulp", "bound", "worst head", box=None)
    for row in _rows(found, details):
        head = f"{max(range(len(row.heads)), key=row.heads.__getitem__)}: {max(row.heads):.3g}" if row.heads else ""
        other = "none" if not row.other else "" if row.other == row.name else row.other
        style = "" if row.is_within else "red"
        table.add_row(row.name, other, f"{row.ulps:.3g}", f"{row.bound:.3g}", head, style=style)
    screen.print(table, highlight=False)
    for line in verdict(found):
        screen.print(line, highlight=False, soft_wrap=True)


def _rows(found: Comparison, details: bool) -> list[PlaceRow]:
    """All places, or those around the first that leaves the bound, and the last."""
    rows = list(found.places)
    if details or len(rows) <= 2 * SHOWN:
        return rows
    at = len(rows) - 1 if found.first is None else rows.index(found.first)
    return [*rows[max(0, at - SHOWN) : at + SHOWN], *([rows[-1]] if at + SHOWN < len(rows) else [])]
