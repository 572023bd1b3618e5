"""Public functions that `torch.compile` may take as one step of its program, however it met them first."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from .._keywords import in_place_of, untraced
from ._find import get_backend

Step = TypeVar("Step", bound=Callable[..., Any])

STEPS: dict[str, Any] = {}
"""The functions by name, as they are called, and read where one is no step."""

_read: dict[str, Callable[..., Any]] = {}
_compilers: dict[str, Any] = {}


def may_be_step(function: Step) -> Step:
    """Let Dynamo read, in the place of a function, what the backend of PyTorch makes of it (`as_step`).

    A first call under `torch.compile` loads that backend, as to read all of one attention takes a third of a second.
    No mark of Dynamo says so, which `functools.wraps` would hand on to the functions of users.
    """
    called: Any = function
    name, has_compiler, compilers, load, read = called.__name__, _has_compiler, _compilers, _load, _read

    def chosen(*arguments: Any, **options: Any) -> Any:
        if has_compiler() and compilers["torch"].is_dynamo_compiling():  # Dynamo reads this, and does not call it
            load()
            return read.get(name, called)(*arguments, **options)
        return called(*arguments, **options)

    STEPS[name] = called
    return in_place_of(function, chosen)


@untraced
def _has_compiler() -> bool:
    """Whether PyTorch's is loaded. Dynamo would take longer to read `sys.modules` than a call of attention."""
    if not _compilers and (compiler := sys.modules.get("torch.compiler")) is not None:
        _compilers["torch"] = compiler
    return bool(_compilers)


@untraced
def _load() -> None:
    with contextlib.suppress(ImportError, ValueError):  # then the function itself is read
        as_step: Any = get_backend("torch").as_step
        _read.update({name: as_step(name, STEPS[name]) for name in STEPS.keys() - _read.keys()})
