"""Where weights come from: arrays of any library, recorded calls, and query and key."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attention_core import Attention
from attention_core.backend import available_backends, get_backend
from attention_core.weights import attention_weights

SCORES_AT_ONCE = 2**22


class Computed:
    """Weights that are computed from query and key as they are looked at.

    Parameters
    ----------
    query : Array, shape (..., H, M, D)
    key : Array, shape (..., G, N, D)
    **options
        Of `attention_core.weights.attention_weights`, such as ``mask`` and ``is_causal``.
    """

    def __init__(self, query: Any, key: Any, /, **options: Any) -> None:
        self.query, self.key, self._options = query, key, options

    def weights(self, **chosen: Any) -> Any:
        """Compute weights as `attention_core.weights.attention_weights` does."""
        return attention_weights(self.query, self.key, **chosen, **self._options)


class Source:
    """One layer of weights, as NumPy arrays of one sample: (H, M, N)."""

    def __init__(self, attention: Any, sample: int, heads: Sequence[int] | None, /) -> None:
        self._kept: Sequence[int] | None = None
        attention = attention.weights if isinstance(attention, Attention) else attention
        if attention is None:
            hint = 'return_weights=True returns them; in transformers, attn_implementation="eager"'
            raise TypeError(f"expected weights; got None: {hint}")
        if isinstance(attention, Mapping):  # such as what a model of transformers returns
            names = [str(name) for name in attention]
            names = [name for name in names if "attentions" in name] or names
            raise TypeError(
                f"expected weights; got {type(attention).__name__}, of which they may be {', '.join(names)}"
            )
        self._computes = all(hasattr(attention, name) for name in ("weights", "query", "key"))
        sample = whole("sample", sample)
        self._sample, self._heads = sample, None if heads is None else [whole("heads", head) for head in heads]
        self._held = attention if self._computes else _of_sample(as_numpy(attention), sample)
        if self._computes:
            shapes: list[tuple[int, ...]] = [getattr(each, "shape", ()) for each in (attention.query, attention.key)]
            if min(map(len, shapes)) < 3:
                raise ValueError(f"expected query and key (..., heads, length, D); got {shapes[0]} and {shapes[1]}")
            (count, self.rows, _), self.columns = shapes[0][-3:], shapes[1][-2]
        else:
            count, self.rows, self.columns = self._held.shape
        for head in self._heads or ():
            if not -count <= head < count:
                raise ValueError(f"expected heads in [{-count}, {count}); got {head}")
        self.heads = [head % count for head in (range(count) if self._heads is None else self._heads)]
        if 0 in (count, self.rows, self.columns):
            raise ValueError(f"expected at least one head, query and key; got {(count, self.rows, self.columns)}")
        if not self.heads or len(set(self.heads)) < len(self.heads):
            raise ValueError(f"expected at least one head, and each once; got {self.heads}")
        if not self._computes:
            self._held = self._held[self.heads]
            _check_weights(self._held)

    def keep(self, queries: Sequence[int]) -> None:
        """Have these queries alone."""
        self._kept, self.rows = queries, len(queries)

    def some(self, queries: range) -> Any:
        """The weights of some queries, (H, queries, N)."""
        within = slice(queries.start, queries.stop)
        chosen = within if self._kept is None else list(self._kept[within])
        if not self._computes:
            return self._held[:, chosen]
        return _of_sample(as_numpy(self._held.weights(queries=chosen, heads=self._heads)), self._sample)

    @property
    def shape(self) -> tuple[int, int, int]:
        """H, M, N."""
        return len(self.heads), self.rows, self.columns


def reduced(some: Any, shape: tuple[int, int, int], block: tuple[int, int]) -> Any:
    """The largest number of each block, (H, rows, columns), of a function that gives (H, queries, N).

    NaN is the largest. Some 4 million numbers are held at a time, as far as one row of all heads is no more.
    """
    if block == (1, 1):
        return some(range(shape[1]))
    heads, rows, columns = shape
    starts = np.arange(0, columns, block[1])
    at_once = max(1, SCORES_AT_ONCE // (heads * columns))
    found = np.full((heads, -(-rows // block[0]), len(starts)), -np.inf)
    for first in range(0, rows, at_once):
        queries = range(first, min(first + at_once, rows))
        numbers = np.maximum.reduceat(some(queries), starts, axis=-1, dtype=found.dtype)
        cells = np.arange(queries.start, queries.stop) // block[0]
        new = np.flatnonzero(np.diff(cells, prepend=-1))
        numbers = np.maximum.reduceat(numbers, new, axis=-2)
        within = slice(int(cells[0]), int(cells[-1]) + 1)
        found[:, within] = np.maximum(found[:, within], numbers)
    return found


def sources_of(attention: Any, sample: int, heads: Sequence[int] | None) -> list[Source]:
    """One source for each layer, out of one of them, a sequence, or a sequence of steps with some layers each."""
    several = attention if _is_sequence(attention) else [attention]
    if not several:
        raise ValueError("expected attention of at least one layer; got none")
    if not any(map(_is_sequence, several)):
        return [Source(each, sample, heads) for each in several]
    counts = [len(each) if _is_sequence(each) else None for each in several]
    if len(set(counts)) > 1 or not counts[0]:
        raise ValueError(f"expected steps of the same number of layers; got {counts}")
    return [_joined([Source(each, sample, heads) for each in steps]) for steps in zip(*several, strict=True)]


def _is_sequence(attention: Any) -> bool:
    return isinstance(attention, list | tuple) and not isinstance(attention, Attention)


def _joined(steps: list[Source]) -> Source:
    """The steps of one layer as queries of one map.

    All steps of attention to another sequence or to a static cache have the same keys. Else keys end at the last query,
    with 0 for those that a step has forgotten or does not have yet.
    """
    queries = np.cumsum([each.rows for each in steps])
    sizes = [each.columns for each in steps]
    is_window = 1 < steps[0].rows == sizes[0] < queries[-1]  # as long as the prompt
    same_keys = len(set(sizes)) == 1 and not is_window
    ends = [sizes[0]] * len(steps) if same_keys else (queries + (sizes[0] - steps[0].rows)).tolist()
    weights = [each.some(range(each.rows)) for each in steps]
    found = np.zeros((len(weights[0]), queries[-1], ends[-1]), weights[0].dtype)
    for each, last, end in zip(weights, queries, ends, strict=True):
        if len(each) != len(found) or each.shape[-1] > end:
            raise ValueError(f"expected steps of one sequence; got (heads, queries, keys) {[i.shape for i in weights]}")
        found[:, last - each.shape[1] : last, end - each.shape[2] : end] = each
    joined = Source(found, 0, None)
    joined.heads = steps[0].heads
    return joined


def whole(name: str, number: Any) -> int:
    """An integer, or a refusal."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"expected {name} of integers; got {number!r}") from None


def as_numpy(array: Any) -> Any:
    """An array of any library in NumPy, floats of 16 bits as float32."""
    if not isinstance(array, np.ndarray):
        backends = [get_backend(name) for name in available_backends() if name in sys.modules]
        owner = next((each for each in backends if each.owns(array)), None)
        array = np.asarray(array if owner is None else owner.to_numpy(array))
    return array.astype(np.float32) if array.dtype.kind == "V" or array.dtype.itemsize == 2 else array


def _of_sample(weights: Any, sample: int) -> Any:
    if weights.ndim < 2:
        raise ValueError(f"expected weights (..., heads, queries, keys); got {weights.shape}")
    weights = weights[None] if weights.ndim == 2 else weights
    samples = weights.reshape(math.prod(weights.shape[:-3]), *weights.shape[-3:])
    if not -len(samples) <= sample < len(samples):
        raise ValueError(f"expected sample in [0, {len(samples)}); got {sample}")
    return samples[sample]


def _check_weights(weights: Any) -> None:
    if weights.dtype.kind != "f":
        raise TypeError(f"expected weights of a floating-point dtype; got {weights.dtype}")
    finite = weights[np.isfinite(weights)]
    if finite.size and (finite.min() < 0 or finite.max() > 1.001):
        raise ValueError(f"expected weights in [0, 1]; got {finite.min():.6g} to {finite.max():.6g}")
