"""Libraries that not everything needs: asked for where they are, with the command that installs them."""

from __future__ import annotations

import importlib
from typing import Any


class Missing:
    """In the place of a library that is not installed."""

    def __init__(self, name: str, use: str) -> None:
        self._error = missing(name, use, f"pip install {name}")

    def __getattr__(self, name: str) -> Any:
        """Raise."""
        if name.startswith("__"):  # which whoever inspects modules asks for
            raise AttributeError(name)
        raise self._error


def optional(name: str, use: str) -> Any:
    """Import a library; where it is not installed, return what raises as soon as it is used."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return Missing(name, use)


def missing(name: str | None, use: str, advice: str) -> ModuleNotFoundError:
    """The error for a library that is needed and not installed."""
    return ModuleNotFoundError(f"expected {name} for {use}; got none: {advice}", name=name)
