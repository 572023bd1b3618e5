"""Guards of Dynamo, which it compares before each call of a program: not the hundreds of functions that it traced here.

They take longer to be compared than a small call takes to run, and nobody replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence
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


# Older versions know no such option.
GUARD_OPTIONS = {"guard_filter_fn": guards_to_keep} if hasattr(torch.compiler, "skip_guard_on_globals_unsafe") else {}
