"""The definition under the guard: what is masked reaches nothing."""

from __future__ import annotations

import functools

from .._arrays import Array
from .call import Call, Result, upcast_call
from .dense import dense, dense_scores
from .facts import Facts, facts_of
from .finite import guarded, inputs_are_finite, sanitized_keys


def guarded_dense(call: Call, facts: Facts | None = None, *, weights: bool = False, logsumexp: bool = True) -> Result:
    """Attention from all scores at once. The facts may be those of an earlier call of this signature."""
    call = upcast_call(call)
    facts = facts_of(call) if facts is None else facts
    return guarded(functools.partial(dense, facts=facts, logsumexp=logsumexp), call, facts, weights=weights)


def guarded_scores(call: Call) -> Array:
    """All scores of a call, with -inf where masked, which nothing but a gradient gets through."""
    call = upcast_call(call)
    facts = facts_of(call)
    if facts.allowed is None or not call.backend.differentiates:
        return dense_scores(call, facts)
    if call.backend.loops.traced and not facts.is_readable:
        return dense_scores(call, facts._replace(is_guarded=True))
    is_finite = facts.is_readable and bool(inputs_are_finite(call))
    return dense_scores(call if is_finite else sanitized_keys(call, facts), facts)
