"""The definition under the guard: what is masked reaches nothing."""

from __future__ import annotations

from .._arrays import Array
from .._backend import is_on_host
from .call import Call, Result, upcast_call
from .dense import dense, dense_scores
from .facts import Facts, facts_of
from .finite import average_of_columns, inputs_are_finite, is_clean, sanitized, sanitized_keys


def guarded_dense(call: Call, facts: Facts | None = None, *, weights: bool = False, logsumexp: bool = True) -> Result:
    """Attention from all scores at once. The facts may be those of an earlier call of this signature."""
    if facts is None:
        call = upcast_call(call)
        facts = facts_of(call)
    backend, wanted = call.backend, {"weights": weights, "logsumexp": logsumexp}
    if facts.allowed is None or call.assume_finite:
        return dense(call, facts, **wanted)
    if backend.loops.traced and not facts.is_readable:
        return dense(call, facts._replace(is_guarded=True), **wanted)
    if facts.is_readable and (not backend.differentiates or bool(inputs_are_finite(call))):
        result = dense(call, facts, **wanted)
        if backend.differentiates or bool(is_clean(result.output, call.xp)):
            return result
    facts = facts._replace(is_sanitized=backend.differentiates and is_on_host(call.query))
    result = dense(sanitized(call, facts), facts, **wanted)
    return result._replace(output=average_of_columns(result.output, call.xp))


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
