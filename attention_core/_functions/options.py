"""The options of attention, of which `scaled_dot_product_attention` says what they mean.

Public functions take them as ``**options``, and so hold what a call gives, and nothing else. A new one is a line here,
a check, and, if it says how attention is computed, a field of `Call`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypedDict

from attention_core._arrays import Array, Namespace
from attention_core.masks import Mask
from attention_core.random import Dropout


class Options(TypedDict, total=False):
    """All options, in the order in which signatures show them."""

    mask: Mask | Array | None
    bias: Array | None
    is_causal: bool
    scale: float | Array | None
    softcap: float | Array | None
    score_mod: Callable[..., Array] | None
    sinks: Array | None
    dropout: Dropout | None
    return_weights: bool
    return_logsumexp: bool
    implementation: str
    arithmetic: str
    assume_finite: bool | None
    xp: Namespace | None


FLAGS = ("is_causal", "return_weights", "return_logsumexp")
DEFAULTS = dict.fromkeys(Options.__annotations__) | dict.fromkeys(FLAGS, False)
ARRAYS = ("mask", "bias", "scale", "softcap", "score_mod", "sinks", "dropout", "starts")  # which are some, or hold some
DEFAULTS |= {"implementation": "auto", "arithmetic": "fast"}


def options_but(*names: str) -> list[inspect.Parameter]:
    """All options but these, as parameters of a function."""
    hints: dict[str, Any] = Options.__annotations__
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name].__forward_arg__)
        for name, default in DEFAULTS.items()
        if name not in names
    ]
