"""How functions are compiled: each apart from all others, and without guards of what nobody replaces.

Dynamo compares its guards before each call of a program. Those of the hundreds of functions that it traced here take
longer to be compared than a small call takes to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch

TRACED = ("__import_attention_core", "__import_attention_torch", "__import_array_api_compat")
STATE = ("CONTEXTS", "forward_ad", ".torch.backends")  # what changes, and is looked at in there


def guards_to_keep(guards: Sequence[Any]) -> list[bool]:
    """Whether each guard may ever fail: all but those of functions and constants of the packages that are traced."""
    return [
        not any(package in guard.name for package in TRACED) or any(name in guard.name for name in STATE)
        for guard in guards
    ]


# Older versions know no such options. PyTorch compiles a function for a few shapes only, unless told otherwise.
GUARD_OPTIONS = {"guard_filter_fn": guards_to_keep} if hasattr(torch.compiler, "skip_guard_on_globals_unsafe") else {}
RECOMPILE_OPTIONS = {"recompile_limit": 1000} if "recompile_limit" in signature(torch.compile).parameters else {}


def compiled_apart(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function as one graph for each kind of call.

    PyTorch keeps its graphs, and counts them, with the code object: here one that no other function shares.
    """

    def program(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    program.__code__ = program.__code__.replace()
    return torch.compile(program, fullgraph=True, **RECOMPILE_OPTIONS, **options)  # type: ignore[no-any-return]
