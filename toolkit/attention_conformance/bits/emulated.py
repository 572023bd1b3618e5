"""Ways to compute one head of attention in floating point, each of which has its own bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from attention_conformance.oracle.dense import Dense
from attention_conformance.problem import NumpyArray


@dataclass(frozen=True)
class Way:
    """One way of computing; the fields are what two ways may differ in.

    Attributes
    ----------
    products : str
        ``whole``, as the BLAS of NumPy; one term after the other, ``fused`` or ``separate``; or in ``float64``.
    block, splits : int
        Keys for each step of an online softmax, 0 for all; and parts of the keys that are computed apart.
    merge : str
        Whether ``sums`` of the parts are merged, or ``outputs`` by their logsumexp.
    order : str
        ``forward``, or ``backward`` from the last key.
    weights, sums : str
        The type of the weights that multiply the values, and that of the sums.
    power : str
        ``exp``, ``exp2`` of scores times log2(e), or ``exp in float64``, rounded.
    scale : str
        ``before`` the product, ``after`` it, or its root on ``both`` sides.
    division : str
        By the sum: ``last``, ``first`` of the weights, or ``reciprocal``, which multiplies.
    subnormals : str
        ``kept`` or ``flushed``.
    """

    products: str = "whole"
    block: int = 0
    splits: int = 1
    merge: str = "sums"
    order: str = "forward"
    weights: str = "wide"
    sums: str = "wide"
    power: str = "exp"
    scale: str = "before"
    division: str = "last"
    subnormals: str = "kept"


AXES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "scale": ("place of the scale", ("before", "after", "both")),
    "power": ("exponential", ("exp", "exp2", "exp in float64")),
    "division": ("division by the sum", ("last", "first", "reciprocal")),
    "block": ("keys in a block", (0, 16, 32, 64, 128)),
    "weights": ("type of the weights", ("wide", "bfloat16", "float16")),
    "sums": ("type of the sums", ("wide", "bfloat16", "float16", "float64")),
    "splits": ("splits of the keys", (1, 2, 3, 4, 8)),
    "merge": ("what is merged of the splits", ("sums", "outputs")),
    "order": ("order of the keys", ("forward", "backward")),
    "products": ("multiply-add", ("whole", "separate", "fused", "float64")),
    "subnormals": ("subnormal numbers", ("kept", "flushed")),
}
"""The fields of `Way` in words, and their values."""


@dataclass(frozen=True)
class Head:
    """One head: query (M, D), key (N, D), value (N, E), what is let through (M, N), and a bias or none."""

    query: NumpyArray
    key: NumpyArray
    value: NumpyArray
    through: NumpyArray
    bias: NumpyArray | None
    scale: float


def head_of(dense: Dense, sample: int, head: int) -> Head:
    """One head of a whole problem."""
    at = (sample, head)
    shape = dense.through.shape
    bias = None if dense.bias is None else np.broadcast_to(dense.bias, shape)[at]
    return Head(dense.query[at], dense.key[at], dense.value[at], dense.through[at], bias, dense.scale)


def changes_of(way: Way) -> Iterator[Way]:
    """Every way that differs in one field."""
    for name, (_, values) in AXES.items():
        for each in values:
            if each != getattr(way, name):
                yield replace(way, **{name: each})


def unlike(first: Way, second: Way) -> list[str]:
    """The fields in which two ways differ."""
    return [each.name for each in fields(Way) if getattr(first, each.name) != getattr(second, each.name)]


def emulated(head: Head, way: Way, dtype: str) -> NumpyArray:
    """The output of one head (M, E), computed in this way and rounded to a type."""
    wide: Any = np.float64 if dtype == "float64" else np.float32
    operands = [_flushed(each.astype(wide), way) for each in (head.query, head.key, head.value)]
    bias = np.zeros_like(head.through, wide) if head.bias is None else head.bias.astype(wide)
    is_base_2 = way.power == "exp2"
    bias = np.where(head.through, bias * wide(math.log2(math.e)) if is_base_2 else bias, wide(-np.inf))
    if way.order == "backward":
        operands, bias = [operands[0], *(each[::-1] for each in operands[1:])], bias[:, ::-1]
    query, key, value = operands
    scale = wide(head.scale * (math.log2(math.e) if is_base_2 else 1.0))
    size = -(-len(key) // way.splits)
    parts = []
    for start in range(0, len(key), size):
        at = slice(start, start + size)
        parts.append(_online(partial(_scores, query, scale=scale, way=way), key[at], value[at], bias[:, at], way))
    output = _flushed(parts[0].output(way) if len(parts) == 1 else _merged(parts, way), way)
    return np.where(head.through.any(axis=-1, keepdims=True), output, 0).astype(_type(dtype))


def _type(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def _flushed(array: NumpyArray, way: Way) -> NumpyArray:
    return np.where(abs(array) < np.finfo(array.dtype).tiny, 0, array) if way.subnormals == "flushed" else array


def _rounded(array: NumpyArray, name: str) -> NumpyArray:
    return array if name == "wide" else array.astype(_type(name)).astype(array.dtype)


def _scores(query: NumpyArray, key: NumpyArray, *, scale: Any, way: Way) -> NumpyArray:
    if way.scale == "both":
        root = type(scale)(math.sqrt(scale)) if scale > 0 else scale
        return _product(query * root, np.swapaxes(key * root, 0, 1), way)
    if way.scale == "after":
        return np.asarray(_product(query, np.swapaxes(key, 0, 1), way) * scale)
    return _product(query * scale, np.swapaxes(key, 0, 1), way)


def _product(first: NumpyArray, second: NumpyArray, way: Way) -> NumpyArray:
    if way.products == "whole":
        return np.asarray(first @ second)
    wide = first.dtype.type
    if way.products == "float64":
        return np.asarray((first.astype(np.float64) @ second.astype(np.float64)).astype(wide))
    found = np.zeros((len(first), second.shape[1]), wide)
    kind = np.float64 if way.products == "fused" and wide is np.float32 else wide
    first, second = first.astype(kind), second.astype(kind)  # a product of two numbers of 24 bits is exact there
    for at in range(second.shape[0]):
        found = (found + first[:, at, None] * second[at]).astype(wide)
    return found


def _power(scores: NumpyArray, way: Way) -> NumpyArray:
    if way.power == "exp in float64":
        return np.exp(scores.astype(np.float64)).astype(scores.dtype)
    return np.asarray((np.exp2 if way.power == "exp2" else np.exp)(scores))


@dataclass(frozen=True)
class _Part:
    """The sums of some keys: the maximum (M, 1), the sum of weights (M, 1), and that of values (M, E)."""

    top: NumpyArray
    total: NumpyArray
    summed: NumpyArray

    def output(self, way: Way) -> NumpyArray:
        total = np.where(self.total > 0, self.total, 1)
        if way.division == "reciprocal":
            return np.asarray(self.summed * (1 / total))
        return self.summed if way.division == "first" else np.asarray(self.summed / total)


def _online(
    scores: Callable[[NumpyArray], NumpyArray], key: NumpyArray, value: NumpyArray, bias: NumpyArray, way: Way
) -> _Part:
    """The sums of some keys, block by block."""
    if not way.block or way.block >= len(key):
        found = scores(key) + bias
        return _summed(found, value, found.max(axis=-1, keepdims=True), way)
    top = np.full((len(bias), 1), -np.inf, bias.dtype)
    total, summed = np.zeros_like(top), np.zeros((len(bias), value.shape[1]), bias.dtype)
    for start in range(0, len(key), way.block):
        at = slice(start, start + way.block)
        block = scores(key[at]) + bias[:, at]
        before, top = top, np.maximum(top, block.max(axis=-1, keepdims=True))
        part = _summed(block, value[at], top, way)
        shrunk = np.where(np.isfinite(before), _power(before - _finite(top), way), 0).astype(bias.dtype)
        total = _rounded(total * shrunk + part.total, _narrow(way))
        summed = _rounded(summed * shrunk + part.summed, _narrow(way))
    if way.division == "first":
        summed = summed / np.where(total > 0, total, 1)
    return _Part(top, total, summed)


def _narrow(way: Way) -> str:
    return "wide" if way.sums == "float64" else way.sums


def _finite(top: NumpyArray) -> NumpyArray:
    return np.where(np.isfinite(top), top, 0).astype(top.dtype)


def _summed(scores: NumpyArray, value: NumpyArray, top: NumpyArray, way: Way) -> _Part:
    """Weights and values of a block, summed in the type of the sums."""
    powers = _flushed(_power(scores - _finite(top), way), way)
    is_one_by_one = way.products in ("separate", "fused")
    if way.sums in ("bfloat16", "float16") and not way.block:
        total = np.zeros_like(top)
        for at in range(len(value)):
            total = _rounded(total + powers[:, at, None], way.sums)
    elif way.sums == "float64":
        total = powers.astype(np.float64).sum(axis=-1, keepdims=True).astype(top.dtype)
    else:
        total = np.cumsum(powers, axis=-1)[:, -1:] if is_one_by_one else powers.sum(axis=-1, keepdims=True)
    if way.division == "first" and not way.block:
        powers = powers / np.where(total > 0, total, 1)
    weights = _rounded(powers, way.weights)
    if way.sums == "float64":
        summed = (weights.astype(np.float64) @ value.astype(np.float64)).astype(top.dtype)
    elif way.sums != "wide" and not way.block:
        summed = np.zeros((len(scores), value.shape[1]), top.dtype)
        for at in range(len(value)):
            summed = _rounded(summed + weights[:, at, None] * value[at], way.sums)
    else:
        summed = _product(weights, value, way)
    return _Part(top, total, summed)


def _merged(parts: list[_Part], way: Way) -> NumpyArray:
    """Parts of the keys together, one after the other."""
    if way.merge == "outputs" or way.division == "first":
        logarithm = np.log2 if way.power == "exp2" else np.log
        sums = [_finite(each.top) + logarithm(np.where(each.total > 0, each.total, 0)) for each in parts]
        outputs = [each.output(way) for each in parts]
    else:
        sums, outputs = [each.top for each in parts], [each.summed for each in parts]
    top = _finite(np.maximum.reduce(sums))
    factors = [_power(each - top, way) for each in sums]
    totals = factors if outputs[0] is not parts[0].summed or way.division == "first" else [
        factor * each.total for factor, each in zip(factors, parts, strict=True)
    ]  # fmt: skip
    total, summed = totals[0], factors[0] * outputs[0]
    for at in range(1, len(parts)):
        total, summed = total + totals[at], summed + factors[at] * outputs[at]
    total = np.where(total > 0, total, 1)
    return np.asarray(summed * (1 / total) if way.division == "reciprocal" else summed / total)
