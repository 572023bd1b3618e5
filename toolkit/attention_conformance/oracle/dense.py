r"""The definition of attention on whole arrays, for problems that are too large for 50 digits.

Numbers of 16 and 32 bits are computed in float64, and numbers of 64 bits in NumPy's longest type. The tests compare
this reference with the oracle of 50 digits. Planted faults are changes of a `Dense`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attention_conformance.oracle.attention import Exact, summed
from attention_conformance.oracle.positions import passes
from attention_conformance.problem import NumpyArray, Problem


@dataclass(frozen=True)
class Dense:
    """One problem as arrays in a wide type, with key and value heads repeated, and its rules as one array.

    Attributes
    ----------
    query, key, value : numpy.ndarray, shapes (..., H, M, D), (..., H, N, D) and (..., H, N, E)
    mask : numpy.ndarray or None
        What the mask alone lets through, broadcastable to (..., H, M, N).
    causal : int or None
        The offset of causality.
    group_size : int
        Query heads for each key/value head.
    alibi : numpy.ndarray or None
        The rate of each head (H,) by which scores fall with the distance of query and key.
    uniform : numpy.ndarray or None
        Rows (..., M, 1) that get the average of all values instead.
    """

    query: NumpyArray
    key: NumpyArray
    value: NumpyArray
    mask: NumpyArray | None
    causal: int | None
    bias: NumpyArray | None
    sinks: NumpyArray | None
    scale: float
    softcap: float | None
    group_size: int
    cotangent: Any = None
    alibi: NumpyArray | None = None
    uniform: NumpyArray | None = None

    @property
    def positions(self) -> tuple[NumpyArray, NumpyArray]:
        """Query positions as a column, and key positions as a row."""
        return np.arange(self.query.shape[-2])[:, None], np.arange(self.key.shape[-2])[None, :]

    @property
    def added(self) -> Any:
        """What is added to the scores: the bias, and what ALiBi takes off by distance, which is 0 for the last pair."""
        rows, columns = self.positions
        distance = abs(columns - columns.size - rows + rows.size)
        falls = 0.0 if self.alibi is None else -self.alibi[:, None, None] * distance
        return falls if self.bias is None else _finite(self.bias) + falls

    @property
    def through(self) -> NumpyArray:
        """Every pair of a query and a key that mask, causality and an infinite bias let through."""
        full = (*self.query.shape[:-1], self.key.shape[-2])
        rows, columns = self.positions
        through = np.broadcast_to(True if self.mask is None else self.mask, full)
        if self.causal is not None:
            through = through & (columns <= rows + self.causal)
        return through if self.bias is None else through & (self.bias != -np.inf)

    def changed(self, **fields: Any) -> Dense:
        """Replace some fields."""
        return replace(self, **fields)

    def hiding(self, through: NumpyArray) -> Dense:
        """The same with a further mask."""
        return self.changed(mask=through if self.mask is None else self.mask & through)

    @property
    def magnitudes(self) -> Dense:
        """The same of the magnitudes of its numbers, from which the scales of the gradients come."""
        names = ("query", "key", "value", "scale", "cotangent")
        return self.changed(**{name: abs(getattr(self, name)) for name in names})

    def scored(self, scores: NumpyArray) -> Dense:
        """The same with other scores in place of the capped ones."""
        return self.changed(softcap=None, scale=0.0, bias=scores if self.bias is None else scores + self.bias)

    @functools.cached_property
    def answer(self) -> Answer:
        """What it gives, computed once: many faults change it afterwards."""
        with np.errstate(all="ignore"):
            return _gradients(self) if self.cotangent is not None else _forward(self)


@dataclass(frozen=True)
class Answer:
    """What a `Dense` gives: arrays by name; and what tells the scales of their errors, and kappa.

    These take as long as the arrays, and most of the answers of faults are never measured against.
    """

    arrays: dict[str, NumpyArray]
    sizes: Callable[[], tuple[dict[str, NumpyArray], float]]

    @property
    def scales(self) -> dict[str, NumpyArray]:
        """The scales of the errors, by the name of the array."""
        return self.sizes()[0]

    @property
    def kappa(self) -> float:
        """The largest magnitude of a score."""
        return self.sizes()[1]

    def exact(self, names: Container[str]) -> dict[str, Exact]:
        """The arrays of these names, as far as there are such."""
        return {name: as_exact(each, self.scales[name]) for name, each in self.arrays.items() if name in names}

    def of(self, **arrays: NumpyArray) -> Answer:
        """Other arrays, with the same scales of errors."""
        return replace(self, arrays=arrays)


def dense_of(problem: Problem) -> Dense:
    """A problem without changes of the scores, dropout and pieces as whole arrays."""
    arrays, options = problem.arrays, problem.options
    kind: Any = np.longdouble if arrays["query"].dtype == np.float64 else np.float64
    group_size = problem.sizes[1] // max(1, arrays["key"].shape[-3])
    width = arrays["query"].shape[-1]
    causal, mask = 0 if options.get("is_causal") else None, problem.mask
    if mask is not None and mask.kind == "Causal" and isinstance(mask.arguments.get("offset", 0), int):
        causal, mask = min(mask.arguments.get("offset", 0), 0 if causal == 0 else math.inf), None
    scale = options.get("scale")
    key, value = (np.repeat(arrays[name].astype(kind), group_size, axis=-3) for name in ("key", "value"))
    return Dense(
        query=arrays["query"].astype(kind),
        key=key,
        value=value,
        mask=None if mask is None else passes(mask, problem),
        causal=None if causal is None else int(causal),
        bias=arrays["bias"].astype(kind) if "bias" in arrays else None,
        sinks=arrays["sinks"].astype(kind) if "sinks" in arrays else None,
        scale=(width**-0.5 if width else 1.0) if scale is None else scale,
        softcap=options.get("softcap"),
        group_size=group_size,
        cotangent=None if problem.cotangent is None else problem.cotangent.astype(kind),
        alibi=arrays["alibi"].astype(kind) if "alibi" in arrays else None,
    )


def answer(dense: Dense) -> Answer:
    """Output, weights and logsumexp; where there is a cotangent, the gradients instead."""
    return dense.answer


def as_exact(array: NumpyArray, scale: NumpyArray) -> Exact:
    """Wide numbers as unevaluated sums of two floats."""
    high = array.astype(np.float64)
    with np.errstate(invalid="ignore"):
        low = np.where(np.isfinite(high), array - high, 0).astype(np.float64)
    return Exact(high, low, np.broadcast_to(scale, array.shape).astype(np.float64))


@dataclass(frozen=True)
class _Weights:
    """The weights of all rows, and what they came from."""

    through: NumpyArray
    weights: NumpyArray
    sink: NumpyArray
    logsumexp: NumpyArray
    derivative: NumpyArray | float
    unknown: NumpyArray  # rows (..., 1) whose scores are not known


def _finite(array: NumpyArray) -> NumpyArray:
    """0 for what is not finite; the array itself where all is."""
    finite = np.isfinite(array)
    return array if finite.all() else np.where(finite, array, 0)


def _weights(dense: Dense) -> _Weights:
    query, key, through = _finite(dense.query), _finite(dense.key), dense.through
    scores = (dense.scale * query) @ np.swapaxes(key, -1, -2)
    derivative: NumpyArray | float = 1.0
    if dense.softcap is not None:
        fraction = np.tanh(scores / dense.softcap)
        scores, derivative = dense.softcap * fraction, 1 - fraction**2
    scores, attended = scores + dense.added, through
    if dense.uniform is not None:
        through, scores = through | dense.uniform, np.where(dense.uniform, 0, scores)
    scores = np.where(through, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    sinks = None if dense.sinks is None else dense.sinks[:, None, None]
    top = top if sinks is None else np.maximum(top, sinks)
    shift = np.where(np.isfinite(top), top, 0)
    powers = np.exp(scores - shift)
    power = np.zeros_like(top) if sinks is None else np.exp(sinks - shift)
    total = powers.sum(axis=-1, keepdims=True) + power
    divisor = np.where(total > 0, total, 1)
    unknown: Any = np.zeros(top.shape, dtype=bool)
    if query is not dense.query or key is not dense.key:
        bad_key = np.expand_dims(~np.isfinite(dense.key).all(axis=-1), -2)
        bad_query = ~np.isfinite(dense.query).all(axis=-1, keepdims=True)
        unknown = (attended & (bad_key | bad_query)).any(axis=-1, keepdims=True)
    return _Weights(
        through,
        powers / divisor,
        power / divisor,
        logsumexp=(shift + np.log(total))[..., 0],
        derivative=derivative,
        unknown=unknown,
    )


def _kappas(dense: Dense, through: NumpyArray) -> NumpyArray:
    """The largest magnitude of the scores of each row (..., M)."""
    query, key = abs(_finite(dense.query)), abs(_finite(dense.key))
    size = abs(dense.scale) * (query @ np.swapaxes(key, -1, -2))
    size = size + abs(dense.added)
    kappas = np.where(through, size, 0).max(axis=-1, initial=0.0)
    return np.asarray(kappas if dense.sinks is None else np.maximum(kappas, abs(dense.sinks[:, None])))


def _forward(dense: Dense) -> Answer:
    softmax = _weights(dense)
    value = _finite(dense.value)
    output = softmax.weights @ value
    if value is not dense.value:
        through = softmax.through.astype(output.dtype)
        infinite = [through @ (dense.value == sign * np.inf).astype(output.dtype) > 0 for sign in (1, -1)]
        output = np.where(infinite[0], np.inf, np.where(infinite[1], -np.inf, output))
        unknown = (through @ np.isnan(dense.value).astype(output.dtype) > 0) | (infinite[0] & infinite[1])
        output = np.where(unknown, np.nan, output)
    weights, logsumexp = softmax.weights, softmax.logsumexp
    if softmax.unknown.any():
        output = np.where(softmax.unknown, np.nan, output)
        weights = np.where(softmax.unknown & softmax.through, np.nan, weights)
        logsumexp = np.where(softmax.unknown[..., 0], np.nan, logsumexp)

    @functools.cache
    def sizes() -> tuple[dict[str, NumpyArray], float]:
        kappas = _kappas(dense, softmax.through)
        certainty = np.where(softmax.unknown[..., 0], 1, 1 + kappas)
        scales = {"output": softmax.weights @ abs(value), "weights": softmax.weights, "logsumexp": certainty}
        return scales, float(kappas.max(initial=0.0))

    return Answer({"output": output, "weights": weights, "logsumexp": logsumexp}, sizes)


def _gradients(dense: Dense, share: NumpyArray | float = 1.0) -> Answer:
    softmax = _weights(dense)
    weights, shape = softmax.weights, (dense.query.shape[-3], 1, 1)
    finite = dense.changed(**{name: _finite(getattr(dense, name)) for name in ("query", "key", "value")})

    def through_softmax(of: Dense, sign: float) -> tuple[NumpyArray, NumpyArray]:
        d_weights = of.cotangent @ np.swapaxes(of.value, -1, -2)
        mean = (weights * d_weights).sum(axis=-1, keepdims=True)
        return weights * (d_weights + sign * mean), mean

    d_scores, mean = through_softmax(finite, -1.0)
    d_scores = share * d_scores
    arrays = products(finite, share * weights, d_scores * softmax.derivative)
    if dense.bias is not None:
        arrays["bias"] = summed(d_scores, dense.bias.shape)
    if dense.sinks is not None:
        arrays["sinks"] = summed(share * softmax.sink * -mean, shape)[:, 0, 0]

    @functools.cache
    def sizes() -> tuple[dict[str, NumpyArray], float]:
        size, size_mean = through_softmax(finite.magnitudes, 1.0)
        scales = products(finite.magnitudes, share * weights, size)
        if dense.bias is not None:
            scales["bias"] = summed(size, dense.bias.shape)
        if dense.sinks is not None:
            scales["sinks"] = summed(softmax.sink * size_mean, shape)[:, 0, 0]
        return scales, float(_kappas(dense, softmax.through).max(initial=0.0))

    return Answer(arrays, sizes)


def gradient_of(dense: Dense, share: NumpyArray) -> dict[str, NumpyArray]:
    """What some pairs of a query and a key add to the gradients, by their share of each pair."""
    with np.errstate(all="ignore"):
        return _gradients(dense, share).arrays


def products(dense: Dense, weights: NumpyArray, d_scores: NumpyArray) -> dict[str, NumpyArray]:
    """The gradients that come from weights and the gradient of the scores."""
    return {
        "query": dense.scale * (d_scores @ dense.key),
        "key": grouped(dense.scale * (np.swapaxes(d_scores, -1, -2) @ dense.query), dense),
        "value": grouped(np.swapaxes(weights, -1, -2) @ dense.cotangent, dense),
    }


def grouped(array: NumpyArray, dense: Dense) -> NumpyArray:
    """The sum over the query heads that share a key head."""
    *leading, heads, rows, width = array.shape
    return np.asarray(array.reshape(*leading, heads // dense.group_size, dense.group_size, rows, width).sum(axis=-3))
