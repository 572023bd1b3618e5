"""A bar of what processes run, while their messages come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attention_cli.terminal import console
from attention_conformance.measure.finding import Finding, Started
from attention_conformance.measure.messages import Asked, Described
from attention_conformance.written.report import way_text

Message = TypeVar("Message")


def followed(messages: Iterable[Message], label: str) -> Iterator[Message]:
    """The messages, with a bar that goes at the end; without one where the standard error stream is no terminal."""
    screen, total = console(stderr=True), 0
    columns = (TextColumn("{task.description:<54}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(label, total=None)
        for message in messages:
            if isinstance(message, Described):
                total += message.count
                progress.update(task, total=total)
            elif isinstance(message, Asked):
                progress.update(task, description=f"probing: {message.question}")
            elif isinstance(message, Started):
                case = message.result
                progress.update(task, description=f"{case.backend} {case.case} {way_text(case)}".lstrip())
            elif isinstance(message, Finding):
                progress.advance(task)
            yield message
