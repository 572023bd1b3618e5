"""Settings that several layers share: their checks, specs of linear maps, masks and dropout."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from attention_core import parameters as trees
from attention_core._arithmetic import check_arithmetic_name
from attention_core._arrays import Array, Namespace
from attention_core._attention.choice import check_implementation
from attention_core._checks import check_boolean, check_flag, check_number, check_positive, check_rank
from attention_core._functions.sagan import check_data_format
from attention_core.layers._layer import Initial, Layer
from attention_core.masks import Mask
from attention_core.masks._mask import as_mask
from attention_core.random import Dropout, check_dropout


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


_CHECKS: dict[str, Callable[[str, Any], None]] = {  # by the name of a setting, or else by its type
    "int": check_positive,
    "bool": check_flag,
    "scale": check_number,
    "softcap": functools.partial(check_number, positive=True),
    "epsilon": functools.partial(check_number, positive=True),
    "dropout": lambda _, rate: check_dropout(Dropout(rate)),
    "implementation": lambda _, implementation: check_implementation(implementation),
    "arithmetic": lambda _, arithmetic: check_arithmetic_name(arithmetic),
    "data_format": lambda _, data_format: check_data_format(data_format),
}


def check_settings(layer: Layer) -> None:
    """Raise unless each setting is valid by itself; all integers are sizes, which are positive."""
    for field in fields(layer):
        kind, _, optional = str(field.type).partition(" | ")
        value = getattr(layer, field.name)
        if value is not None or not optional:
            _CHECKS[field.name if field.name in _CHECKS else kind](field.name, value)
