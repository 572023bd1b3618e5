"""Choosing the next token from logits: the same one on every library, for the same logits and seed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attention_core._arithmetic.elementary import exp2
from attention_core._arithmetic.exact import FLOAT64_MAX, LN_2, to_float64, uncontracted
from attention_core._arithmetic.operations import run
from attention_core._arrays import (
    Array,
    Arrays,
    Gradients,
    Namespace,
    on_device_of,
    positions,
    scalar_like,
    shape,
    sizes,
    upcast,
)
from attention_core._backend import (
    Backend,
    Operation,
    array_namespace,
    as_constant,
    can_be_read,
    common_namespace,
    register,
    with_autocast,
)
from attention_core._checks import (
    check_floating,
    check_number,
    check_offset,
    check_positive,
    check_rank,
    check_shapes,
    only_array,
    plain_integer,
)
from attention_core.random import check_seed, hash_words, seed_words, uniform_integers

_SAMPLED = 3  # the purpose of this stream of random words, besides those of `attention_core.random`
_WEIGHT_BITS = 30  # weights are integers of so many bits, whose sums over all tokens are exact in float64
_INDEX_BITS = 22  # no vocabulary has more tokens


class Sampling(NamedTuple):
    """The plan of drawing a token."""

    temperature: float
    top_k: int
    top_p: float


register("Sampling", Sampling)


@with_autocast(lowers=False)
def sample_tokens(
    logits: Array,
    /,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: Any = 0,
    step: Any = 0,
    xp: Namespace | None = None,
) -> Array:
    r"""Choose a token for each row of logits, by the greatest, or by chance.

    .. math:: P(t) \propto e^{y_t / T}

    Parameters
    ----------
    logits : Array, shape (..., V)
    temperature : float
        T; with 0, the token with the greatest logit is chosen, of equal ones the first.
    top_k : int, optional
        Choose among the k most probable tokens, and those that are as probable as the last of them.
    top_p : float, optional
        Choose among the most probable tokens whose probabilities, after ``top_k``, just reach this share of the sum.
    seed : int or Array of int
        As in `Dropout`.
    step : int or Array of int, shape ()
        Every step of a text needs another number, or another seed.
    xp : array namespace, optional

    Returns
    -------
    Array of int32, shape (...)

    Raises
    ------
    TypeError, ValueError
        When arguments do not fit; and when a row has no greatest logit, as it holds NaN, or nothing but -inf. Where
        logits cannot be read without waiting, in compiled functions and on accelerators, its token is -1.

    Notes
    -----
    Infinite logits are the greatest: at any temperature one of them is chosen, each with the same probability.

    Seed, step and row decide. Probabilities are integers out of :math:`2^{30}` times the greatest, whose sums no order
    changes: so libraries that give the same logits choose the same token. A token that is :math:`2^{31}` times less
    probable than the most probable one is never drawn.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> logits = xp.asarray([0.0, 3.0, 2.0, -1.0])
    >>> int(sample_tokens(logits, temperature=0.0))
    1
    >>> [int(sample_tokens(logits, top_k=2, seed=7, step=step)) for step in range(8)]
    [1, 1, 1, 1, 1, 1, 1, 2]
    """
    step = check_offset("step", as_constant(step, logits, wraps=True))
    xp = common_namespace(xp, {"logits": logits, "step": step if hasattr(step, "dtype") else None})
    top_k = plain_integer(top_k)
    check_sampling(temperature, top_k, top_p)
    check_rank("logits", logits, 1, "(..., V)")
    check_floating("logits", logits)
    check_seed(seed)
    if hasattr(step, "dtype"):
        check_shapes("step: integer", {"step": step})
    *leading, count = shape(logits, xp=xp)
    if sizes(logits)[-1] == 0:
        raise ValueError("expected logits of at least one token; got none")
    rows = xp.reshape(upcast(logits, xp=xp), (-1, count))
    if temperature == 0:
        tokens = first_greatest(rows, xp)
    else:
        index = positions(shape(rows, xp=xp)[0], rows, xp=xp)
        step = xp.reshape(xp.astype(step, xp.int32), (1,)) if hasattr(step, "dtype") else step
        words = [hash_words(*seed_words(seed, xp=xp), _SAMPLED, word, step, index, xp=xp) for word in (0, 1)]
        plan = Sampling(float(temperature), 0 if top_k is None else top_k, 1.0 if top_p is None else float(top_p))
        (tokens,) = run(SAMPLE, plan, rows, *(uniform_integers(word, xp=xp) for word in words), xp=xp)
    has_nan, is_possible = xp.any(xp.isnan(rows), axis=-1), xp.any(xp.greater(rows, -math.inf), axis=-1)
    tokens = xp.where(xp.logical_and(is_possible, xp.logical_not(has_nan)), tokens, -1)
    if can_be_read(tokens):
        check_tokens(tokens)
    return xp.reshape(tokens, tuple(leading))


def check_tokens(tokens: Array) -> None:
    """Raise if one is missing, as the logits of its row have no greatest one."""
    if 0 not in sizes(tokens) and int(array_namespace(tokens).min(tokens)) < 0:
        raise ValueError("expected a greatest logit in every row; got NaN, or nothing but -inf")


def check_sampling(temperature: Any, top_k: Any, top_p: Any) -> None:
    """Raise unless these options of sampling are valid."""
    check_number("temperature", temperature)
    if only_array(temperature) is not None or temperature < 0:
        raise ValueError(f"expected temperature >= 0; got {temperature}")
    if top_k is not None:
        check_positive("top_k", top_k)
    if top_p is not None:
        check_number("top_p", top_p, positive=True)
        if only_array(top_p) is not None or top_p > 1:
            raise ValueError(f"expected top_p in (0, 1]; got {top_p}")


def first_greatest(rows: Array, xp: Namespace) -> Array:
    """The first index of the maximum of each row: libraries differ in which of equal ones they return."""
    count = shape(rows, xp=xp)[-1]
    index = positions(count, rows, xp=xp)
    is_greatest = xp.equal(rows, xp.max(rows, axis=-1, keepdims=True))
    return xp.astype(xp.min(xp.where(is_greatest, index, count - 1), axis=-1), xp.int32)


def _forward(plan: Sampling, arrays: Arrays, backend: Backend) -> Arrays:
    xp = backend.namespace
    logits, high, low = arrays
    wide = to_float64(logits, xp)
    greatest = xp.max(wide, axis=-1, keepdims=True)
    distance = xp.where(xp.equal(wide, greatest), 0.0, xp.subtract(wide, greatest))  # infinite ones, too
    factor = min(1 / (LN_2 * plan.temperature), FLOAT64_MAX)
    power = exp2(uncontracted(xp.multiply(distance, factor), xp), xp)
    weights = xp.round(xp.multiply(power, 2.0**_WEIGHT_BITS))
    one = scalar_like(1.0, wide, xp)
    if plan.top_k:
        weights = _kept(weights, xp.ones_like(weights), scalar_like(float(plan.top_k), wide, xp), xp)
    if plan.top_p < 1:
        least = xp.multiply(xp.sum(weights, axis=-1, keepdims=True), plan.top_p)
        weights = _kept(weights, weights, xp.maximum(least, one), xp)
    total = xp.sum(weights, axis=-1, keepdims=True)
    high, low = (xp.astype(word, xp.float64) for word in (high, low))
    share = xp.add(xp.multiply(high, 2.0**-24), xp.multiply(low, 2.0**-48))
    goal = xp.floor(uncontracted(xp.multiply(xp.expand_dims(share, axis=-1), total), xp))
    goal = xp.minimum(goal, xp.subtract(total, 1.0))
    count = shape(weights, xp=xp)[-1]
    index = xp.astype(positions(count, weights, xp=xp), xp.float64)
    before = xp.zeros_like(total)  # the most tokens whose weights sum up to no more than the goal
    for bit in reversed(range(min(_INDEX_BITS, (count - 1).bit_length()) if isinstance(count, int) else _INDEX_BITS)):
        more = xp.add(before, 2.0**bit)
        sums = xp.sum(xp.where(xp.less(index, more), weights, 0.0), axis=-1, keepdims=True)
        before = xp.where(xp.less_equal(sums, goal), more, before)
    return (xp.astype(xp.squeeze(before, axis=-1), xp.int32),)


def _kept(weights: Array, counted: Array, least: Array, xp: Namespace) -> Array:
    """The greatest weights for which what is counted reaches a number; 0 for the others. The threshold is bisected."""
    threshold = xp.zeros_like(xp.sum(weights, axis=-1, keepdims=True))
    for bit in reversed(range(_WEIGHT_BITS + 1)):
        higher = xp.add(threshold, 2.0**bit)
        reached = xp.sum(xp.where(xp.greater_equal(weights, higher), counted, 0.0), axis=-1, keepdims=True)
        threshold = xp.where(xp.greater_equal(reached, least), higher, threshold)
    return xp.where(xp.greater_equal(weights, threshold), weights, 0.0)


def _backward(*_: Any) -> Gradients:
    return None, None, None


def _abstract(plan: Sampling, arrays: Arrays, backend: Backend) -> Arrays:
    xp = backend.namespace
    return (xp.zeros(shape(arrays[0], xp=xp)[:-1], dtype=xp.int32, **on_device_of(arrays[0])),)


SAMPLE = register("sample", Operation(_forward, _backward, _abstract, needs_float64=True))
