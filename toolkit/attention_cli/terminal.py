"""What the commands share: options, a console, and refusals in one line."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer
from rich.console import Console

from attention_files.writing import FileError, check_writable

Many = list[str] | None


def check_known(option: str, names: Many, known: Iterable[str]) -> None:
    """Refuse a name that is not known."""
    for name in names or ():
        if name not in known:
            article = "an" if option[0] in "aeiou" else "a"
            raise refusal(f"expected {article} {option} out of {', '.join(known)}; got {name!r}")


def check_file(path: Path | None) -> None:
    """Refuse a file that cannot be written, before there is anything to write."""
    if path is not None:
        check_writable(path)


@contextlib.contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Say in one line what an exception of these kinds says, or one of a file."""
    refused: tuple[type[Exception], ...] = (FileError, *kinds)
    try:
        yield
    except refused as error:
        raise refusal(str(error)) from error


@contextlib.contextmanager
def telling_warnings() -> Iterator[None]:
    """Say each warning in one line."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    for each in found:
        typer.echo(f"attention-core: {each.message}", err=True)


def console(*, stderr: bool = False) -> Console:
    """Text as it is, square brackets included; as wide as the table where no terminal limits it."""
    screen = Console(stderr=stderr, markup=False)
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen.width = 200
    return screen


def refusal(message: str) -> typer.Exit:
    """Say in one line why the command cannot be run as given."""
    typer.echo(f"attention-core: {message}", err=True)
    return typer.Exit(2)
