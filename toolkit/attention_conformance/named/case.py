"""What a named case is, and the file of them."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLES = tomllib.loads(Path(__file__).with_name("properties.toml").read_text(encoding="utf-8"))
"""What ``properties.toml`` says: properties, and patterns of the faults and the cases that break them."""

PROPERTIES: Mapping[str, str] = TABLES["properties"]
"""The properties by which cases are chosen, with a sentence each."""

RESULTS = {
    "right": 0,  # mended, or never wrong on this device
    "refused": 0,  # an error now, where there was a wrong result
    "wrong": 1,
    "documented": 1,  # the library's convention is another one, and says so
    "not run": 77,  # needs a device that was not there, and has no script
}
"""What a reproducer showed, and the exit status of its script."""


@dataclass(frozen=True)
class Shown:
    """What the reproducer showed when it was run last: a word of `RESULTS`, a date, versions, and the sentence."""

    result: str
    detail: str
    date: str = ""
    versions: str = ""


@dataclass(frozen=True)
class NamedCase:
    """A mistake of a published attention.

    Attributes
    ----------
    name, summary, story : str
        The first line of the docstring, and the rest of it.
    thread, title : str
        The repository and the number of a public thread, as in pytorch/pytorch#184330, and its title.
    property : str
        A key of `PROPERTIES`.
    line : int
        The line of the contract that it belongs to; 0 for a numerical hazard, or for memory.
    versions : str
        Those concerned, as far as the thread says.
    packages : tuple of str
        As a package index knows them.
    needs : str
        The device that shows it, by default "cpu".
    geometry : mapping
        Sizes B, H, G, M, N, D, E as far as the case asks for them.
    like : tuple of str
        Cases of the kit that show the same property of any attention.
    shown : Shown
    """

    name: str
    summary: str
    story: str
    thread: str
    title: str
    property: str
    line: int
    versions: str
    packages: tuple[str, ...]
    geometry: Mapping[str, int]
    like: tuple[str, ...]
    shown: Shown
    needs: str = "cpu"

    @functools.cached_property
    def url(self) -> str:
        """The address of the thread; GitHub leads to a request for changes by the number, too."""
        return "https://github.com/" + self.thread.replace("#", "/issues/")

    @functools.cached_property
    def script(self) -> str:
        """The path of the reproducer in the repository; empty where none was ever run."""
        is_run = self.shown.result != "not run"
        return f"evidence/reproducers/scripts/{self.name.replace('-', '_')}.py" if is_run else ""


@functools.cache
def named_cases() -> tuple[NamedCase, ...]:
    """All named cases, by name."""
    rows = tomllib.loads(Path(__file__).with_name("cases.toml").read_text(encoding="utf-8"))
    return tuple(_case(name, **row) for name, row in rows.items())


def _case(
    name: str, *, shown: Mapping[str, str], packages: list[str], like: Iterable[str] = (), **row: Any
) -> NamedCase:
    return NamedCase(name, shown=Shown(**shown), packages=tuple(packages), like=tuple(like), **row)
