"""Attention on chunked arrays of dask, for sequences that no memory holds.

It is lazy. A task computes attention of a chunk of queries to a chunk of keys; a pair that the mask hides has none. A
tree of tasks merges what they found. Tasks run wherever dask does: on threads, on processes, on a cluster.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import array_api_compat.numpy as numpy_namespace
import dask.array
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from dask.utils import apply

from attention_core import Attention, Causal, Dropout, Mask, explain_attention
from attention_core.backend import get_backend, may_count, with_arrays
from attention_core.masks import Given, Spans, flatten
from attention_core.pieces import Partial, merge_partials, partial_attention

__all__ = ["attention"]

DaskArray: TypeAlias = "dask.array.Array"
Chunks = tuple[tuple[int, ...], ...]
COUNTED = ("score_mod", "dropout")  # what counts samples and heads from the first of a task
NOT_TAKEN = ("return_weights", "shards", "xp")
LAZY = ("bias", "sinks")
IMPLEMENTATIONS = ("auto", "dense", "blockwise")


@dataclass(frozen=True, eq=False)
class Shared:
    """What all tasks read, and the graph holds once.

    Attributes
    ----------
    mask : Mask or None
        Over the whole.
    options : dict
        Those that every piece is given.
    """

    mask: Mask | None
    options: dict[str, Any]

    @property
    def counts(self) -> bool:
        """Whether something counts samples or heads, from the first of a task."""
        return may_count(flatten(self.mask)[0]) or any(self.options.get(name) is not None for name in COUNTED)

    def mask_of(self, batch: Sequence[slice], heads: slice) -> Mask | None:
        """The mask of some samples and heads."""

        def part(array: Any, axes: int) -> Any:
            spans = [*batch[len(batch) - max(0, array.ndim - axes) :], *([heads] if axes == 3 <= array.ndim else [])]
            index = (slice(None) if size == 1 else each for each, size in zip(spans, array.shape, strict=False))
            return array[tuple(index)]

        return None if self.mask is None else with_arrays(self.mask, part)

    def columns(self, spans: Sequence[slice], chunks: Chunks) -> list[list[int]]:
        """For each chunk of queries of some samples and heads, the chunks of keys that the mask does not hide."""
        *batch, heads = spans
        rule = self.mask_of(batch, heads)
        ends = [np.asarray(_ends(sizes), np.int32) for sizes in chunks]
        query, key = (Spans(each[:-1], each[1:] - 1, int(np.diff(each).max(initial=1))) for each in ends)
        query = query._replace(first=query.first[:, None], last=query.last[:, None])
        some = np.asarray(True if rule is None else rule.blocks(query, key, xp=numpy_namespace)[0])
        some = np.broadcast_to(some, np.broadcast_shapes(some.shape, tuple(map(len, chunks))))
        seen: Any = np.any(some, axis=tuple(range(some.ndim - 2)))
        return [np.flatnonzero(row).tolist() for row in seen]


def attention(
    query: DaskArray,
    key: DaskArray,
    value: DaskArray,
    /,
    *,
    split_every: int = 8,
    return_logsumexp: bool = False,
    **options: Any,
) -> Any:
    """Compute scaled dot-product attention, lazily, by chunks of queries and of keys.

    Chunks of samples and heads are those of the query. With a function of scores, dropout, or a mask of a class of
    yours, which count samples and heads, all of these are in one chunk.

    Parameters
    ----------
    query : dask.array.Array, shape (..., H, M, D)
    key, value : dask.array.Array, shapes (..., G, N, D) and (..., G, N, E)
        In chunks along N.
    split_every : int
        How many pieces a task merges.
    return_logsumexp : bool
    mask : Mask or numpy.ndarray of bool, optional
        Over the whole.
    bias : dask.array.Array or numpy.ndarray, optional
        Broadcastable to (..., H, M, N).
    implementation : {"auto", "dense", "blockwise"}
        Of each pair of chunks.
    is_causal, scale, softcap, score_mod, sinks, dropout, arithmetic, assume_finite
        As in `attention_core.scaled_dot_product_attention`. In reproducible arithmetic all keys are in one chunk, and
        the output has the bits of an array in memory.

    Returns
    -------
    dask.array.Array or Attention
        The output, (..., H, M, E), in chunks as those of the query; with ``return_logsumexp`` a named tuple of output
        and logsumexp.

    Arrays of options are copied, as `dask.array.from_array` copies: what is written into them later changes nothing. A
    generator is drawn from once.

    Raises
    ------
    TypeError, ValueError
        As in `attention_core.scaled_dot_product_attention`, before a task is made; also when an argument is no array of
        dask, or sizes of chunks are not known.

    Examples
    --------
    >>> x = dask.array.ones((1, 8, 4), chunks=(1, 3, 4))
    >>> attention(x, x, x, is_causal=True)[0, 0].compute()
    array([1., 1., 1., 1.])
    """
    options = _check((query, key, value), options, split_every)
    rule = _rule(options.pop("mask", None), options.pop("is_causal", False))
    bias, sinks = (_lazy(options.pop(name, None)) for name in LAZY)
    shared = Shared(rule, options)
    query, key, value = _aligned(query, key, value, shared)
    chunks: Chunks = (*query.chunks[:-1], key.chunks[-2])
    bias, sinks = _spread(bias, chunks), _spread(sinks, query.chunks[:-2])
    inputs = [each for each in (query, key, value, bias, sinks) if each is not None]
    name = f"attention-{tokenize(inputs, rule, options, split_every)}"
    graph: dict[Any, Any] = {f"{name}-shared": shared}
    columns = functools.cache(lambda outer: shared.columns(_spans(chunks, outer), chunks[-2:]))
    for index in itertools.product(*(range(len(each)) for each in query.chunks[:-1])):
        *outer, row = index
        spans, pieces = _spans(chunks, index), []
        for column in columns(tuple(outer))[row]:
            keys = ((x.name, *outer, column, 0) for x in (key, value))
            arrays_of = (query.name, *index, 0), *keys, _block(bias, (*index, column))
            pieces.append((f"{name}-piece", *index, column))
            start = _ends(chunks[-1])[column]
            graph[pieces[-1]] = (_piece, f"{name}-shared", *arrays_of, spans, start)
        while len(pieces) > 1:
            groups = [pieces[each : each + split_every] for each in range(0, len(pieces), split_every)]
            merged = [(f"{name}-merge", len(pieces), *index, each) for each in range(len(groups))]
            graph |= {key: (apply, merge_partials, group) for key, group in zip(merged, groups, strict=True)}
            pieces = merged
        dims = (*(each.stop - each.start for each in spans), value.shape[-1])
        graph[(name, *index)] = (_finish, pieces, _block(sinks, tuple(outer)), dims, query.dtype)
    whole = HighLevelGraph.from_collections(name, graph, dependencies=inputs)
    output = _array(whole, name, 0, (*query.chunks[:-1], value.chunks[-1]), query.dtype)
    if not return_logsumexp:
        return output
    return Attention(output, None, _array(whole, name, 1, query.chunks[:-1], _wide(query.dtype)))


def _check(arrays: tuple[Any, ...], options: dict[str, Any], split_every: int) -> dict[str, Any]:
    """Raise where one array in memory would be refused, or has no chunks; return options that nobody else holds."""
    for name, array in zip(("query", "key", "value"), arrays, strict=True):
        if not isinstance(array, dask.array.Array):
            raise TypeError(f"expected {name} as an array of dask; got {type(array).__name__}")
        if any(math.isnan(size) for size in array.shape):
            raise ValueError(
                f"expected {name} in chunks of known sizes; got unknown ones: compute_chunk_sizes() finds them"
            )
    if not isinstance(split_every, int) or split_every < 2:
        raise ValueError(f"expected split_every >= 2; got {split_every}")
    for name in NOT_TAKEN:
        if options.get(name):
            raise ValueError(f"expected no {name} with arrays of dask; got one")
    if isinstance(options.get("mask"), dask.array.Array):
        raise TypeError(
            "expected mask as a rule or an array of NumPy, which each task reads a part of; got one of dask"
        )
    implementation, dropout = options.get("implementation", "auto"), options.get("dropout")
    if implementation not in IMPLEMENTATIONS:
        expected = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"expected an implementation out of {expected} with arrays of dask; got {implementation!r}")
    if isinstance(dropout, Dropout):  # which all tasks are to see alike
        options["dropout"] = dropout._replace(seed=get_backend("numpy").draw_seed(dropout.seed))
    told = {name: _like(each) if name in LAZY else each for name, each in options.items() if name != "implementation"}
    explain_attention(*map(_like, arrays), **told)
    return {name: each if name in LAZY else copy.deepcopy(each) for name, each in options.items()}


def _like(array: Any) -> Any:
    """An array of NumPy with the shape and dtype of a lazy one, in the memory of one number."""
    return array if array is None else np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _rule(mask: Any, is_causal: bool) -> Mask | None:
    if is_causal:
        return Causal() if mask is None else Causal() & mask
    return mask if mask is None or isinstance(mask, Mask) else Given(mask)


def _lazy(array: Any) -> Any:
    return array if array is None or isinstance(array, dask.array.Array) else dask.array.from_array(np.asarray(array))


def _aligned(query: Any, key: Any, value: Any, shared: Shared) -> tuple[Any, Any, Any]:
    """The arrays in chunks that fit each other: heads in whole groups, and the width in one."""
    group = max(1, query.shape[-3] // max(1, key.shape[-3]))  # of no heads, too
    count = query.ndim - 3
    if shared.counts:
        query = query.rechunk(dict.fromkeys(range(count + 1), -1))
    elif any(size % group for size in query.chunks[-3]):
        query = query.rechunk({count: -1})
    query = query.rechunk({-1: -1})
    rows = (key.shape[-2],) if shared.options.get("arithmetic") == "reproducible" else key.chunks[-2]
    outer = (*query.chunks[:-3], tuple(size // group for size in query.chunks[-3]), rows)
    return query, key.rechunk((*outer, -1)), value.rechunk((*outer, -1))


def _spread(array: Any, chunks: Chunks) -> Any:
    """A broadcastable array in chunks that fit these."""
    if array is None:
        return None
    fitting = chunks[len(chunks) - array.ndim :]
    return array.rechunk(tuple((1,) if size == 1 else each for size, each in zip(array.shape, fitting, strict=True)))


def _block(array: Any, index: tuple[int, ...]) -> Any:
    """The key of the block of a broadcastable array."""
    if array is None:
        return None
    indices = index[len(index) - array.ndim :]
    return (array.name, *(0 if size == 1 else each for size, each in zip(array.shape, indices, strict=True)))


@functools.lru_cache(maxsize=256)
def _ends(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *itertools.accumulate(sizes))


def _spans(chunks: Chunks, index: tuple[int, ...]) -> list[slice]:
    """What a block spans of each axis."""
    return [slice(ends[each], ends[each + 1]) for each, ends in zip(index, map(_ends, chunks), strict=False)]


def _array(whole: HighLevelGraph, name: str, field: int, chunks: Chunks, dtype: Any) -> DaskArray:
    """An array of one of the results."""
    ours, ends = f"{name}-{Attention._fields[2 * field]}", () if field else (0,)
    indices = itertools.product(*(range(len(each)) for each in chunks[: len(chunks) - len(ends)]))
    layer = {(ours, *index, *ends): (operator.getitem, (name, *index), field) for index in indices}
    graph = HighLevelGraph({**whole.layers, ours: layer}, {**whole.dependencies, ours: {name}})
    return dask.array.Array(graph, ours, chunks, dtype=dtype)


def _wide(dtype: Any) -> Any:
    return np.dtype("float64" if dtype == np.float64 else "float32")


# --- tasks ---


def _piece(shared: Shared, query: Any, key: Any, value: Any, bias: Any, spans: list[slice], start: int) -> Any:
    """Compute attention of a chunk of queries to a chunk of keys."""
    *batch, heads, rows = spans
    options = {"mask": shared.mask_of(batch, heads), "bias": bias, "query_start": rows.start, "key_start": start}
    return partial_attention(query, key, value, **options, **shared.options)


def _finish(pieces: list[Partial], sinks: Any, dims: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    """Output and logsumexp of a chunk of queries; a sink is where the sums begin, as a score without a value."""
    scores = np.asarray(-np.inf if sinks is None else sinks, _wide(dtype))[..., None]
    start = Partial(np.zeros(dims, scores.dtype), np.broadcast_to(scores, dims[:-1]))
    total = merge_partials(start, *pieces)
    return total.output.astype(dtype), total.logsumexp
