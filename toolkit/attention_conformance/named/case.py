"""What a named case is, and how its file is read."""

from __future__ import annotations

import ast
import functools
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROPERTIES = {
    "mask": "True means may attend, and a bias is added",
    "combined rules": "what one rule excludes is excluded, whatever the others say",
    "causal": "key position ≤ query position + offset",
    "window": "a window counts in positions, with both ends as documented",
    "decode": "a cached step computes what the whole sequence computes",
    "fully masked row": "such a row gives 0, no NaN, and no gradient",
    "masked non-finite": "a masked NaN or infinity reaches nothing",
    "attended non-finite": "an attended NaN or infinity arrives, in its row alone",
    "weights": "asking for weights changes nothing else",
    "scale": "the scale is the one of the caller, of either sign",
    "softcap": "softcap comes before bias and mask",
    "score function": "bias, ALiBi and score functions change the scores alone",
    "sinks": "a sink adds to the denominator once",
    "precision": "computed wide, rounded once",
    "range": "scores of any size are compared with their maximum",
    "grouped heads": "query head h uses key head ⌊h / (H / G)⌋",
    "sizes": "a size decides nothing but the shape",
    "memory layout": "strides of the arguments change nothing",
    "gradient": "gradients are those of the result",
    "dropout": "forward and backward drop the same weights, at the rate asked for",
    "repetition": "the same call gives the same bits, alone or in a batch",
    "compiled": "a compiled call computes what the eager one does",
}
"""The properties by which cases are chosen, with a sentence each."""

RESULTS = {
    "right": 0,  # mended, or never wrong on this device
    "refused": 0,  # an error now, where there was a wrong result
    "wrong": 1,
    "documented": 1,  # the library's convention is another one, and says so
    "not run": 77,  # needs a device, or a package, that was not there
}
"""What a reproducer showed, and the exit status of its script."""

_HEADER = re.compile(r"^# /// script$\n(?P<lines>(?:^#(?: .*)?$\n)+?)^# ///$\n", re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """What the reproducer showed when it was run last: a word of `RESULTS`, a date, versions, and the sentence."""

    result: str
    date: str
    versions: str
    detail: str


@dataclass(frozen=True)
class NamedCase:
    """A mistake of a published attention.

    Attributes
    ----------
    name, summary, story : str
        The first line of the docstring, and the rest of it.
    thread, title : str
        The repository and the number of a public thread, as in pytorch/pytorch#184330, and its title.
    url : str
    property : str
        A key of `PROPERTIES`.
    line : int
        The line of the contract that it belongs to; 0 for a numerical hazard, or for memory.
    versions : str
        Those concerned, as far as the thread says.
    packages : tuple of str
        As a package index knows them.
    needs : str
        The device without which the script says "not here", by default "cpu".
    geometry : mapping
        Sizes B, H, G, M, N, D, E as far as the case asks for them.
    like : tuple of str
        Cases of the kit that show the same property of any attention.
    shown : Shown
    path : Path
        The script.
    """

    name: str
    summary: str
    story: str
    thread: str
    title: str
    url: str
    property: str
    line: int
    versions: str
    packages: tuple[str, ...]
    needs: str
    geometry: Mapping[str, int]
    like: tuple[str, ...]
    shown: Shown
    path: Path

    def script(self) -> str:
        """The reproducer, without the story and the data before it."""
        return _HEADER.split(self.path.read_text(encoding="utf-8"))[-1].lstrip("\n")

    def matches(self, word: str) -> bool:
        """Tell whether a word stands in the name, the summary, the story or the title."""
        return word.lower() in " ".join((self.name, self.summary, self.story, self.title, self.property)).lower()


@functools.cache
def _shown() -> dict[str, dict[str, str]]:
    """What each script showed last, by the name of the case."""
    found: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("shown.json").read_text(encoding="utf-8"))
    return found


def read(path: Path) -> NamedCase:
    """Read a case from its script; a field that is missing is a ``KeyError``."""
    text = path.read_text(encoding="utf-8")
    summary, _, story = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")
    header = _HEADER.search(text)
    if header is None:
        raise ValueError(f"expected the metadata of a script in {path.name}; got none")
    metadata = tomllib.loads(re.sub(r"^# ?", "", header["lines"], flags=re.MULTILINE))
    fields: dict[str, Any] = metadata["tool"]["attention-core"]
    name = path.stem.replace("_", "-")
    return NamedCase(
        name=name,
        summary=" ".join(summary.split()),
        story=story.strip(),
        # GitHub leads to a request for changes by the number, too.
        url="https://github.com/" + fields["thread"].replace("#", "/issues/"),
        packages=tuple(metadata["dependencies"]),
        needs=fields.get("needs", "cpu"),
        like=tuple(fields.get("like", ())),
        shown=Shown(**{"date": "", "versions": "", **_shown()[name]}),
        path=path,
        **{each: fields[each] for each in ("thread", "title", "property", "line", "versions", "geometry")},
    )


@functools.cache
def named_cases() -> tuple[NamedCase, ...]:
    """All named cases, by name."""
    return tuple(read(path) for path in sorted((Path(__file__).parent / "scripts").glob("*.py")))


def find_case(name: str) -> NamedCase:
    """The case of a name, or of a part that no other name has, such as the number of its thread."""
    cases = named_cases()
    whole = [case for case in cases if f"-{name}-" in f"-{case.name}-"]
    found = [case for case in cases if case.name == name] or whole or [case for case in cases if name in case.name]
    if len(found) != 1:
        among = ", ".join(case.name for case in found or cases)
        raise ValueError(f"expected a part of one name out of {among}; got {name!r}")
    return found[0]
