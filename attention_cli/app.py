"""The subcommands of ``attention-core``, and its version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from attention_benchmark.command import bench
from attention_cli.backends import backends
from attention_cli.conformance import conformance
from attention_cli.convert import convert

__all__ = ["app"]

app = typer.Typer(
    name="attention-core",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attention-core {version('attention-core')}")
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Attention with the same numbers on every framework, and the proof of it."""


for command in (backends, bench, convert, conformance):
    app.command()(command)
