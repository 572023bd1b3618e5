"""Names under which operations, plans and rules stand in saved programs. They outlive the files they are written in."""

from __future__ import annotations

from typing import TypeVar

Thing = TypeVar("Thing")

_things: dict[str, object] = {}
_names: dict[object, str] = {}


def register(name: str, thing: Thing) -> Thing:
    """Give a class, a function or an `Operation` the name by which saved programs know it; return the thing.

    Raises
    ------
    ValueError
        When the name is taken.
    """
    if _things.setdefault(name, thing) is not thing:
        raise ValueError(f"expected a name that is not taken; got {name!r}, which is that of {_things[name]!r}")
    _names[thing] = name
    return thing


def registered(name: str) -> object:
    """The thing of a name; ``None`` if there is none."""
    return _things.get(name)


def registered_name(thing: object) -> str | None:
    """The name of a thing; ``None`` if it has none."""
    return _names.get(thing)
