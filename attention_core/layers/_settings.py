"""Settings that several layers share: their checks, specs of linear maps, masks and dropout."""

from __future__ import annotations

import functools
import operator
from typing import Any

from attention_core import parameters as trees
from attention_core._arrays import Array, Namespace
from attention_core._checks import check_boolean, check_flag, check_positive, check_rank
from attention_core.layers._layer import Initial, Layer
from attention_core.masks import Mask
from attention_core.masks._mask import as_mask
from attention_core.random import Dropout


def linear_spec(rows: int, columns: int, bias: bool) -> trees.Linear:
    """The spec of a linear map with a weight of shape (rows, columns)."""
    return trees.Linear(Initial((rows, columns), "glorot_uniform"), Initial((columns,), "zeros") if bias else None)


def dropout_in_training(rate: float, seed: Any) -> Dropout | None:
    """Dropout in training, that is with a seed; ``None`` otherwise."""
    return None if seed is None or rate == 0 else Dropout(rate, seed)


def all_masks(mask: Mask | Array | None, query_mask: Array | None, key_mask: Array | None, xp: Namespace) -> Any:
    """Combine masks over pairs, over queries and over keys into one, or ``None``."""
    rules = [] if mask is None else [mask]
    for name, padding, axis in (("query_mask", query_mask, -1), ("key_mask", key_mask, -2)):
        if padding is not None:
            check_rank(name, padding, 1, "(..., length)")
            check_boolean(name, padding)
            rules.append(xp.expand_dims(xp.expand_dims(padding, axis=axis), axis=-3))
    if len(rules) < 2:
        return rules[0] if rules else None
    return functools.reduce(operator.and_, map(as_mask, rules))


def check_sizes(layer: Layer, *names: str) -> None:
    """Raise unless these settings are positive integers."""
    for name in names:
        check_positive(name, getattr(layer, name))


def check_optional_sizes(layer: Layer, *names: str) -> None:
    """Raise unless these settings are positive integers or ``None``."""
    check_sizes(layer, *(name for name in names if getattr(layer, name) is not None))


def check_flags(layer: Layer, *names: str) -> None:
    """Raise unless these settings are True or False."""
    for name in names:
        check_flag(name, getattr(layer, name))
