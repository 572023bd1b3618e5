"""The command ``compare``: two models on the same input, in a process of its own, and where they differ."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from attention_cli.terminal import check_file, console, refusal
from attention_conformance.port.comparison import Comparison, PlaceRow, steps
from attention_conformance.port.sides import ComparisonError
from attention_conformance.written.comparison import verdict
from attention_files.writing import write_file
from attention_workers import Death, Order, carried_out

if TYPE_CHECKING:
    from attention_cli.app import Compare

SHOWN = 8
"""Places, and weights, that are shown unless all are asked for."""

START = 60.0
"""Seconds for the start of a process, of which no model is to blame."""


@dataclass(frozen=True)
class _Asked(Order):
    """What is compared, and how closely."""

    models: tuple[Any, ...]
    bound: float


def compare(options: Compare, /) -> None:
    """Compare two models, show what was found, and exit with its status."""
    check_file(options.json)
    order = _Asked((options.first, options.second, options.input), options.bound)
    step, found = "starting", None
    try:
        times = {"limit": options.timeout, "start": max(options.timeout, START)}
        with contextlib.closing(carried_out([order], options.jobs, _work, **times)) as messages:
            for message in messages:
                if isinstance(message, ComparisonError):
                    raise message
                if isinstance(message, Comparison):
                    found = message
                elif isinstance(message, Death):
                    what = f"took more than {options.timeout:g} seconds" if message.code is None else "crashed"
                    raise _died(step, what)
                else:
                    step = message
                    if sys.stderr.isatty():
                        typer.echo(f"{step} …", err=True)
    except ComparisonError as error:
        raise refusal(str(error)) from error
    except SystemExit as error:  # of a model, in this process
        raise _died(step, "crashed") from error
    assert found is not None
    _show(found, options.verbose)
    if options.json is not None:
        write_file(options.json, (json.dumps(found.json(), indent=1, default=str) + "\n").encode())
    raise typer.Exit(not found.agrees)


def _died(step: str, what: str) -> typer.Exit:
    """Tell that a step did not end, and return the status."""
    typer.echo(f"attention-core: expected the end of {step}; got a process that {what}", err=True)
    return typer.Exit(3)


def _work(order: _Asked) -> Iterator[Any]:
    try:
        yield from steps(*order.models, bound=order.bound)
    except ComparisonError as error:
        yield error


def _show(found: Comparison, verbose: bool) -> None:
    screen = console()
    for name, versions in zip(found.names, found.versions, strict=True):
        screen.print(f"{name} ({', '.join(f'{each} {number}' for each, number in versions.items())})", highlight=False)
    for name, first, second in found.settings:
        screen.print(f"setting {name}: {first} and {second}", highlight=False)
    screen.print(f"weights: {found.same_weights} bitwise equal, {len(found.weights)} not", highlight=False)
    for weight in found.weights if verbose else found.weights[:SHOWN]:
        screen.print(f"  {weight.name}: {weight.says}", highlight=False, soft_wrap=True)
    table = Table("activation", "in the second", "ulp", "bound", "worst head", box=None)
    for row in _rows(found, verbose):
        head = f"{max(range(len(row.heads)), key=row.heads.__getitem__)}: {max(row.heads):.3g}" if row.heads else ""
        other = "none" if not row.other else "" if row.other == row.name else row.other
        style = "" if row.is_within else "red"
        table.add_row(row.name, other, f"{row.ulps:.3g}", f"{row.bound:.3g}", head, style=style)
    screen.print(table, highlight=False)
    for line in verdict(found):
        screen.print(line, highlight=False, soft_wrap=True)


def _rows(found: Comparison, verbose: bool) -> list[PlaceRow]:
    """All places, or those around the first that leaves the bound, and the last."""
    rows = list(found.places)
    if verbose or len(rows) <= 2 * SHOWN:
        return rows
    at = len(rows) - 1 if found.first is None else rows.index(found.first)
    return [*rows[max(0, at - SHOWN) : at + SHOWN], *([rows[-1]] if at + SHOWN < len(rows) else [])]
