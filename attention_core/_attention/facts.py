"""What is known of a call before its scores are computed: query, key and value do not decide it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .._arrays import HALF, Array, Namespace, dtype_name, has_sharding, one_program, sizes
from .._backend import can_be_read, is_exporting
from ..masks import Mask, Positions
from .call import (
    Call,
    group_size,
    scale_like,
    score_positions,
)
from .parts import every_query_has_a_key, has_few_queries
from .scores import allowed_by

MAX_KEPT = 2**16  # scores of a mask that is kept: making a larger one takes less time than what it masks


class Facts(NamedTuple):
    """Facts of a call."""

    scale: Any  # what queries are multiplied by
    group: Any  # query heads for each key/value head
    is_folded: bool  # whether the queries of a group are one below the other in a product
    is_repeated: bool  # whether keys and values are repeated
    at: Positions | None  # where the scores stand, if a rule, a function of scores or dropout asks
    allowed: Array | None  # which pairs may attend, by mask and bias; None for all
    empty: Array | None  # which queries (..., M, 1) may not attend to any key; None if there is none
    is_readable: bool  # whether values can be read now, and no accelerator is waited for, if something is masked
    is_guarded: bool = False  # whether a program looks at products, whose derivatives leave out what is not finite
    is_sanitized: bool = False  # whether rows may be NaN, and their gradients are to reach nothing that is masked


def facts_of(call: Call) -> Facts:
    """The facts of a call, whose arrays of 16 bits are in the type of the computation already."""
    xp, group = call.xp, group_size(call.query, call.key, call.xp)
    asked = call.score_mod is not None or call.dropout is not None or isinstance(call.mask, Mask)
    at = score_positions(call) if asked else None
    allowed = allowed_by(call.mask, call.bias, at, xp)
    has_empty = allowed is not None and not every_query_has_a_key(call)
    is_folded = folds_groups(call, group)
    return Facts(
        scale_like(call.query, call.scale, xp),
        group,
        is_folded,
        not is_folded and not (isinstance(group, int) and group == 1),
        at,
        allowed,
        one_program(_has_no_key, xp)(allowed, xp=xp) if has_empty else None,
        allowed is not None and can_be_read(*call[:3]),
    )


def _has_no_key(allowed: Array, *, xp: Namespace) -> Array:
    return xp.logical_not(xp.any(allowed, axis=-1, keepdims=True))


def lasting_facts(call: Call) -> Facts | None:
    """The facts of all calls of the signature of this one, with a mask of numbers as an array; ``None`` if none last.

    None do of 16 bits, which each call turns into others. Libraries that differentiate keep no array: what they make
    may belong to a trace, or to a mode of the library.
    """
    xp, (*leading, _, rows, _), columns = call.xp, call.query.shape, call.key.shape[-2]
    is_small = math.prod(leading) * rows * columns <= MAX_KEPT
    is_kept = is_small and not call.backend.differentiates and can_be_read(*call[:3])
    if dtype_name(call.query.dtype) in HALF or (call.mask is not None and not is_kept):
        return None
    facts = facts_of(call)
    if facts.empty is not None and not bool(xp.any(facts.empty)):
        facts = facts._replace(empty=None)
    return facts._replace(at=None)


def folds_groups(call: Call, group: Any) -> bool:
    """Whether the queries of a group are one below the other, so that no key or value is repeated.

    In exported programs, PyTorch cannot prove that folded rows of any number come apart again. In JAX, heads or rows
    may be sharded, and folding would gather them; a few queries are gathered for less than repeated keys cost. A
    library without a backend may be a lazy one, which reshapes little.
    """
    if isinstance(group, int) and group == 1:
        return False
    if not call.backend.owns(call.query) or is_exporting(call.query):
        return False
    return not has_sharding(call.query) or has_few_queries(sizes(call.query)[-2], sizes(call.key)[-2])
