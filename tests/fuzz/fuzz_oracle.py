"""Attention and its gradients by their formulas in extended precision, whole arrays at once.

Nothing is shared with the core, nor with the oracle of the conformance kit: positions, dropout and score modifications
are written here again, from the words of the contract. Where ``numpy.longdouble`` is float64, bounds of float64 mean
little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from fuzz_problems import Problem, batch_numbers, boolean_array, segment_ids, wide_name

LONG = np.longdouble
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
TINY = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}


@dataclass(frozen=True)
class Truth:
    """What a call gives, the scale of each number, and the size κ of the scores of each row."""

    output: np.ndarray
    output_scale: np.ndarray
    weights: np.ndarray
    logsumexp: np.ndarray
    kappa: np.ndarray
    allowed: np.ndarray
    kept: np.ndarray
    scores: np.ndarray
    derivatives: np.ndarray
    sink_weight: np.ndarray


# Which query may attend to which key


def allowed_pairs(problem: Problem, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Whether a query may attend to a key, of shape (..., H, M, N): by the mask, causality, and a bias of -inf."""
    through = np.ones(problem.scores_shape, dtype=bool)
    if problem.mask is not None:
        through &= _passes(problem, problem.mask)
    if problem.is_causal:
        through &= _passes(problem, ("causal", 0))
    if "bias" in arrays:
        through &= arrays["bias"].astype(LONG) != -np.inf
    return through


def _passes(problem: Problem, tree: tuple[Any, ...]) -> np.ndarray:
    kind, *rest = tree
    query, key = np.arange(problem.rows)[:, None], np.arange(problem.columns)[None, :]
    if kind == "causal":
        return key <= query + _spread(problem, rest[0])
    if kind == "window":
        left, right, offset = rest
        distance = key - (query + _spread(problem, offset))
        low = -math.inf if left is None else -left
        return (distance >= low) & (distance <= (math.inf if right is None else right))
    if kind == "lengths":
        return np.broadcast_to(key < _spread(problem, rest[0]), problem.scores_shape)
    if kind == "segments":
        query_ids, key_ids = segment_ids(problem, *rest)
        return (query_ids[..., :, None] == key_ids[..., None, :])[..., None, :, :]
    if kind == "function":
        batch, head = _batch_and_head(problem)
        return (batch + head + query + key) % rest[0] != 0
    if kind == "array":
        return boolean_array(problem, *rest)
    if kind == "not":
        return ~_passes(problem, rest[0])
    first, second = (_passes(problem, each) for each in rest)
    return first & second if kind == "and" else first | second


def _spread(problem: Problem, number: Any) -> Any:
    """A number, or one for each sample as (..., 1, 1, 1)."""
    if not isinstance(number, tuple):
        return number
    return batch_numbers(problem, *number).reshape(*problem.leading, 1, 1, 1)


def _batch_and_head(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    batch = np.arange(math.prod(problem.leading)).reshape(*problem.leading, 1, 1, 1)
    return batch, np.arange(problem.heads).reshape(-1, 1, 1)


# Dropout


def _fmix(word: np.ndarray) -> np.ndarray:
    word = word ^ (word >> 16)
    word = (word * 0x85EBCA6B) & 0xFFFFFFFF
    word = word ^ (word >> 13)
    word = (word * 0xC2B2AE35) & 0xFFFFFFFF
    return word ^ (word >> 16)


def keep_scale(problem: Problem) -> np.ndarray:
    """By which dropout multiplies every weight: 0, or 1 / (1 - rate)."""
    if problem.dropout is None or problem.dropout[0] == 0:
        return np.ones(problem.scores_shape, dtype=LONG)
    rate, seed = problem.dropout
    flat = (math.prod((*problem.leading, problem.heads)), problem.rows, problem.columns)
    places = np.indices(flat, dtype=np.uint64)
    state = np.zeros(flat, dtype=np.uint64)
    words = (seed & 0xFFFFFFFF, seed >> 32, 1, *places)
    for index, word in enumerate(words, start=1):
        mark = np.uint64(index * 0x9E3779B9 & 0xFFFFFFFF)
        state = _fmix(state ^ _fmix(np.asarray(word, dtype=np.uint64) ^ mark))
    kept = (state >> 8) >= round(rate * 2**24)
    return np.where(kept, 1 / (1 - LONG(rate)), 0).reshape(problem.scores_shape)


# Scores


def _changed(problem: Problem, scores: np.ndarray, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, Any]]:
    """The change that a score modification adds, and what gives its derivatives: only additions are drawn."""
    if problem.score_mod is None:
        return np.zeros_like(scores), {}
    kind, *numbers = problem.score_mod
    query, key = np.arange(problem.rows)[:, None], np.arange(problem.columns)[None, :]
    head = np.arange(problem.heads).reshape(-1, 1, 1)
    if kind == "alibi":
        rates = np.asarray(_alibi_rates(problem.heads), dtype=LONG).reshape(-1, 1, 1)
        return np.broadcast_to(-rates * abs(key - query - numbers[0]), scores.shape), {}
    if kind == "relative":
        buckets, bidirectional, farthest, offset = numbers
        bucket = np.vectorize(lambda d: _bucket(int(d), buckets, bidirectional, farthest), otypes=[int])
        index = bucket(key - query - offset) if problem.rows and problem.columns else np.zeros((0, 0), dtype=int)
        change = np.moveaxis(arrays["table"].astype(LONG)[index.reshape(problem.rows, problem.columns)], -1, 0)
        return np.broadcast_to(change, scores.shape), {"table": index}
    odd = ((key + head) % 2).astype(LONG)
    return np.broadcast_to(odd * arrays["weight"].astype(LONG), scores.shape), {"weight": odd}


def _alibi_rates(heads: int) -> list[float]:
    """ALiBi: powers of 2^(-8/n) for n a power of two, else filled up with every other one of twice as many."""
    lower = 1
    while lower * 2 <= heads:
        lower *= 2
    rates = [2.0 ** (-8.0 * (i + 1) / lower) for i in range(lower)]
    return rates + [2.0 ** (-8.0 * (i + 1) / (2 * lower)) for i in range(0, 2 * lower, 2)][: heads - lower]


def _bucket(distance: int, buckets: int, bidirectional: bool, farthest: int) -> int:
    """T5's bucket of ``key - query``, in fractions of logarithms where those are exact enough."""
    count, first = buckets, 0
    if bidirectional:
        count //= 2
        first = count if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = count // 2
    if distance < exact:
        return first + distance
    # The largest b with (farthest / exact)^(b / (count - exact)) <= distance / exact, compared in integers.
    steps = [
        b
        for b in range(count - exact)
        if (farthest**b) * exact ** (count - exact) <= distance ** (count - exact) * exact**b
    ]
    return first + min(count - 1, exact + max(steps))


def attention(problem: Problem, arrays: dict[str, np.ndarray]) -> Truth:
    """Output, weights and logsumexp of a problem whose used numbers are finite."""
    allowed = np.broadcast_to(allowed_pairs(problem, arrays), problem.scores_shape)
    query, key, value = widened(problem, arrays)
    with np.errstate(all="ignore"):
        scale = 1 / np.sqrt(LONG(problem.width)) if problem.scale is None else LONG(problem.scale)
        scores = scale * (query @ np.swapaxes(key, -1, -2))
        kappa = abs(scale) * (abs(query) @ np.swapaxes(abs(key), -1, -2))
        derivatives = np.ones_like(scores)
        if problem.softcap is not None:
            cap = LONG(problem.softcap)
            tangent = np.tanh(scores / cap)
            scores, derivatives = cap * tangent, 1 - tangent * tangent
        change, _ = _changed(problem, scores, arrays)
        bias = np.broadcast_to(arrays["bias"].astype(LONG), scores.shape) if "bias" in arrays else np.zeros_like(scores)
        bias = np.where(allowed, bias, 0)
        kappa = np.where(allowed, kappa + abs(change) + abs(bias), 0)
        scores = np.where(allowed, scores + change + bias, -np.inf)
        sink = np.full((problem.heads, 1), -np.inf, dtype=LONG)
        if "sinks" in arrays:
            sink = arrays["sinks"].astype(LONG)[:, None]
        sink = np.broadcast_to(sink, scores.shape[:-1])
        top = np.maximum(scores.max(axis=-1, initial=-np.inf), sink)
        anchor = np.where(np.isfinite(top), top, 0)
        powers, rest = np.exp(scores - anchor[..., None]), np.exp(sink - anchor)
        total = powers.sum(axis=-1) + rest
        weights = np.where(allowed, powers / np.where(total == 0, 1, total)[..., None], 0)
        logsumexp = np.where(total == 0, -np.inf, anchor + np.log(np.where(total == 0, 1, total)))
        kept = keep_scale(problem)
        finite = np.where(np.isfinite(value), value, 0)
        return Truth(
            output=(weights * kept) @ finite,
            output_scale=(weights * kept) @ abs(finite),
            weights=weights,
            logsumexp=logsumexp,
            kappa=np.maximum(kappa.max(axis=-1, initial=0), np.where(np.isfinite(sink), abs(sink), 0)),
            allowed=allowed,
            kept=kept,
            scores=scores,
            derivatives=derivatives,
            sink_weight=rest / np.where(total == 0, 1, total),
        )


def widened(problem: Problem, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Query, and keys and values repeated for all query heads; what is not finite is unused, and counts as 0."""
    repeat = problem.heads // problem.groups
    found = [arrays["query"].astype(LONG)]
    for name in ("key", "value"):
        array = arrays[name].astype(LONG)
        found.append(np.repeat(np.where(np.isfinite(array), array, 0), repeat, axis=-3))
    return found


# Bounds


def relative_bound(problem: Problem, truth: Truth) -> np.ndarray:
    """By how much a row of weights may be off, relative: derived from the sums that are rounded.

    A score is a sum of D products, rounded D + 5 times at the magnitude κ; a total is one of N + 1 exponentials.
    """
    epsilon = EPSILON[wide_name(problem.dtype)]
    roundings = (problem.width + 6) * truth.kappa + problem.columns + 12
    return np.expm1(np.minimum(epsilon * roundings.astype(float), 300.0))


def spacing(scale: np.ndarray, dtype: str) -> np.ndarray:
    """The unit in the last place at a magnitude."""
    _, exponent = np.frexp(np.maximum(scale.astype(float), TINY[dtype]))
    return np.ldexp(1.0, exponent - 1) * EPSILON[dtype]


# Gradients


def gradients(
    problem: Problem, arrays: dict[str, np.ndarray], truth: Truth, g: np.ndarray
) -> dict[str, tuple[Any, Any]]:
    """For every array the gradient of ``sum(output * g)``, and the same sum over magnitudes."""
    query, key, value = widened(problem, arrays)
    g, weights, kept = g.astype(LONG), truth.weights, truth.kept
    scale = 1 / np.sqrt(LONG(problem.width)) if problem.scale is None else LONG(problem.scale)
    d_weights = kept * (g @ np.swapaxes(value, -1, -2))
    size = kept * (abs(g) @ np.swapaxes(abs(value), -1, -2))
    mean, mean_size = ((weights * each).sum(axis=-1, keepdims=True) for each in (d_weights, size))
    d_scores, size = weights * (d_weights - mean), weights * (size + mean_size)
    into, into_size = scale * truth.derivatives * d_scores, abs(scale) * size
    found = {
        "query": (into @ key, into_size @ abs(key)),
        "key": tuple(
            _grouped(problem, np.swapaxes(a, -1, -2) @ b) for a, b in ((into, query), (into_size, abs(query)))
        ),
        "value": tuple(_grouped(problem, np.swapaxes(weights * kept, -1, -2) @ each) for each in (g, abs(g))),
    }
    if "bias" in arrays:
        found["bias"] = tuple(_like(each, arrays["bias"].shape) for each in (d_scores, size))
    if "sinks" in arrays:
        pairs = (-truth.sink_weight * mean[..., 0], truth.sink_weight * mean_size[..., 0])
        found["sinks"] = tuple(each.sum(axis=(*range(each.ndim - 2), -1)) for each in pairs)
    _, parameters = _changed(problem, truth.scores, arrays)
    for name, index in parameters.items():
        found[name] = tuple(_of_parameter(problem, name, index, each) for each in (d_scores, size))
    return found


def _of_parameter(problem: Problem, name: str, index: np.ndarray, d_scores: np.ndarray) -> np.ndarray:
    summed = d_scores.sum(axis=tuple(range(d_scores.ndim - 3)))
    if name == "weight":
        return (index * summed).sum()
    table = np.zeros((problem.score_mod[1], problem.heads), dtype=LONG)
    for query, row in enumerate(index):
        for key, bucket in enumerate(row):
            table[bucket] += summed[:, query, key]
    return table


def _grouped(problem: Problem, array: np.ndarray) -> np.ndarray:
    *leading, _, rows, columns = array.shape
    return array.reshape(*leading, problem.groups, problem.heads // problem.groups, rows, columns).sum(axis=-3)


def _like(array: np.ndarray, dims: tuple[int, ...]) -> np.ndarray:
    padded = (1,) * (array.ndim - len(dims)) + tuple(dims)
    axes = tuple(axis for axis, (have, want) in enumerate(zip(array.shape, padded, strict=True)) if have != want)
    return array.sum(axis=axes, keepdims=True).reshape(dims)
