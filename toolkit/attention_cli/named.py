"""The command ``cases``: mistakes of published attentions, as a list, or one of them with its story."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from attention_cli.terminal import check_known, console, refusal, refusing
from attention_conformance.named import PROPERTIES, find_case, named_cases

if TYPE_CHECKING:
    from attention_cli.app import Cases

WIDTH = 80


def cases(options: Cases, /) -> None:
    """List the cases that are asked for, or tell the one of a name."""
    if options.name is not None:
        _tell(options.name)
        return
    package, like = options.package, options.like
    check_known("property", options.property_, PROPERTIES)
    known = sorted({name for case in named_cases() for name in case.packages})
    check_known("package", package, known)
    chosen = [
        case
        for case in named_cases()
        if all(case.matches(each) for each in options.word or ())
        and (not options.property_ or case.property in options.property_)
        and (not package or set(package) & set(case.packages))
        and (not like or set(like) & set(case.like))
    ]
    if not chosen:
        raise refusal("expected cases that match; got none")
    rows = Table("case", "property", "result", box=None, pad_edge=False)
    for each in chosen:
        rows.add_row(each.name, each.property, each.shown.result)
    screen = console()
    screen.print(rows)
    failed = sum(each.shown.result == "wrong" for each in chosen)
    screen.print(f"\n{len(chosen)} cases, {failed} wrong when last run")


def _tell(name: str) -> None:
    """Tell a case, and where the script is that shows it."""
    with refusing(ValueError):
        found = find_case(name)
    line = f"line {found.line} of the contract" if found.line else "no line of the contract"
    shown = found.shown
    facts = {
        "thread": f"{found.thread}, {found.title!r}",
        "url": found.url,
        "property": f"{found.property} ({line}): {PROPERTIES[found.property]}",
        "versions": found.versions,
        "needs": f"{', '.join(found.packages)} on {found.needs}",
        "like": f"cases {', '.join(found.like)} of the kit" if found.like else "no case of the kit",
        "shown": ", ".join(filter(None, (shown.result, shown.versions, shown.date))) + f": {shown.detail}",
        "script": found.script or "none, as it was never run",
    }
    typer.echo(f"{found.name}\n\n{textwrap.fill(found.summary, WIDTH)}\n")
    for word, text in facts.items():
        first = f"{word + ':':<10}"
        typer.echo(textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * 10, break_long_words=False))
    typer.echo("\n" + "\n\n".join(textwrap.fill(part, WIDTH) for part in found.story.split("\n\n")))
