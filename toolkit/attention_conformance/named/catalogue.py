"""All named cases, and one of them by its name."""

from __future__ import annotations

import functools
from pathlib import Path

from attention_conformance.named.case import NamedCase, read

__all__ = ["find_case", "named_cases"]


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
