"""The tables of the page about named cases: ``python -m attention_conformance.named.page PAGE`` writes them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from attention_conformance.named.case import PROPERTIES, NamedCase, named_cases

_MADE = re.compile(r"(?<=<!-- made by a command -->\n).*", re.DOTALL)


def tables() -> str:
    """How many cases there are, and all of them by property: what the reproducer showed, and with which versions."""
    cases = named_cases()
    ran = [case for case in cases if case.shown.result != "not run"]
    wrong = sum(case.shown.result == "wrong" for case in ran)
    lines = [f"{len(cases)} cases, of which {len(ran)} ran on a CPU; {wrong} of these were wrong."]
    for word, sentence in PROPERTIES.items():
        chosen = [case for case in cases if case.property == word]
        if chosen:
            lines += ["", f"### {word.capitalize()}", "", f"*{sentence[0].upper()}{sentence[1:]}.*", ""]
            lines += ["| case | thread | line | result | with |", "|---|---|---|---|---|", *map(_row, chosen)]
    return "\n".join(lines) + "\n"


def renewed(page: str) -> str:
    """Put the tables into a page, behind its mark."""
    return _MADE.sub(lambda _: "\n" + tables(), page)


def _row(case: NamedCase) -> str:
    result = f"**{case.shown.result}**" if case.shown.result == "wrong" else case.shown.result
    versions = case.shown.versions or case.shown.detail
    name = f"`{case.name}`: {case.summary.rstrip('.')}"
    return f"| {name} | [{case.thread}]({case.url}) | {case.line or '–'} | {result} | {versions} |"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
