"""Masks of rules that depend on lengths alone, as arrays that are made once for small calls."""

from __future__ import annotations

from typing import Any, NamedTuple

from attention_core._arrays import Array
from attention_core._attention.call import Call, score_positions
from attention_core._attention.key_range import masked_columns
from attention_core._backend import is_concrete
from attention_core._checks import remember
from attention_core.masks import Mask, flatten

MAX_SCORES = 2**16  # of a mask that is kept: making a larger one takes less time than what it masks
_MAX_MASKS = 64


class SmallMask(NamedTuple):
    """A rule as an array.

    Attributes
    ----------
    allowed : Array of bool, shape (M, N)
    may_be_empty : bool
        Whether it leaves no key to some query.
    columns : list of slice
        The columns in which some pair may be masked.
    """

    allowed: Array
    may_be_empty: bool
    columns: list[slice]


_known: dict[Any, SmallMask] = {}


def small_mask(call: Call) -> SmallMask | None:
    """A rule as an array; ``None`` where no array is kept.

    Libraries that differentiate keep none: what they make may belong to a trace, or to a mode of the library.
    """
    mask, rows, columns = call.mask, call.query.shape[-2], call.key.shape[-2]
    if call.backend.differentiates or not isinstance(mask, Mask) or not is_concrete(call.query):
        return None
    if rows * columns > MAX_SCORES or not (mask.is_relative() and all(isinstance(at, int) for at in call.starts)):
        return None
    signature = call.xp, getattr(call.query, "device", None), rows, columns, call.starts, flatten(mask, [])
    found = _known.get(signature)
    if found is None:
        xp = call.xp
        allowed = mask.allowed(score_positions(call.query, call.key, call.starts, xp), xp=xp)
        found = SmallMask(allowed, not bool(xp.all(xp.any(allowed, axis=-1))), masked_columns(call))
        remember(_known, signature, found, most=_MAX_MASKS)
    return found
