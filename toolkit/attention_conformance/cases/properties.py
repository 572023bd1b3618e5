"""Cases of properties that need no oracle: what two or more calls of one subject owe each other.

An oracle answers them nevertheless, so that a subject that breaks a property in the same way each time is seen, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attention_conformance.cases.case import Bound, Case, Draw, hard, ordinary
from attention_conformance.cases.contract import MASK
from attention_conformance.cases.kernels import attention
from attention_conformance.problem import Problem

__all__ = ["LENGTHS", "PROPERTIES"]

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66, 96, 127, 128, 129, 130)
"""Lengths of a cache, at the edges of blocks and next to them."""


def parts(dtype: str, kappa: float) -> float:
    """Bound the error of parts that were each rounded once."""
    return ordinary(dtype, kappa) if dtype == "float64" else 1.51 if dtype != "float32" else 8.0


def _steps(draw: Draw) -> Problem:
    """One query for each length of a cache."""
    problem = attention(draw, len(LENGTHS), max(LENGTHS), 64)
    mask = np.arange(max(LENGTHS)) < np.asarray(LENGTHS)[:, None]
    return replace(problem, arrays={**problem.arrays, "mask": mask[None, None]}, mask=MASK)


def _reordered(draw: Draw) -> Problem:
    """The same sample six times, its keys in other orders; blocks of low scores lie between blocks of high ones."""
    problem = attention(draw, 9, 260, 32, batch=1)
    arrays = {name: each.copy() for name, each in problem.arrays.items()}
    arrays["query"][..., 0] = 8.0
    arrays["key"][..., 0] = 0.0
    arrays["key"][..., 64:128, 0] = -40.0
    random = np.random.default_rng(5)
    orders = [np.arange(260), np.arange(260)[::-1], *(np.roll(np.arange(260), shift) for shift in (64, 130))]
    orders += [random.permutation(260) for _ in range(2)]
    for name in ("key", "value"):
        arrays[name] = np.concatenate([arrays[name][:, :, order] for order in orders])
    arrays["query"] = np.repeat(arrays["query"], len(orders), axis=0)
    return replace(problem, arrays=arrays)


def _among_others(draw: Draw, number: float, *, head: bool = False) -> Problem:
    """Ordinary samples, or heads, and one whose numbers are large or NaN."""
    problem = attention(draw, 20, 34, 32, heads=3, batch=3)
    arrays = {name: each.copy() for name, each in problem.arrays.items()}
    at = (slice(None), 1) if head else (1,)
    for each in arrays.values():
        each[at] = each[at] * each.dtype.type(number)
    return replace(problem, arrays=arrays)


def _of_heads(draw: Draw) -> Problem:
    problem = attention(draw, 20, 34, 32, heads=3, batch=3)
    mask = draw.mask(3, 3, 20, 34)
    return replace(problem, arrays={**problem.arrays, "mask": mask}, mask=MASK, calls=(1, 1, 1))


def _window(draw: Draw, left: int, right: int, queries: int = 70) -> Problem:
    problem = attention(draw, queries, queries, 32, "mask")
    at = np.arange(queries)
    mask = (at[None, :] >= at[:, None] - left) & (at[None, :] <= at[:, None] + right)
    mask = np.broadcast_to(mask, problem.arrays["mask"].shape).copy()
    return replace(problem, arrays={**problem.arrays, "mask": mask})


def _alibi(draw: Draw) -> Problem:
    """Rates that are powers of 2, so that the bias is exact in all types."""
    problem = attention(draw, 70, 70, 32, heads=4)
    at, rates = np.arange(70), 2.0 ** -np.arange(1, 5)
    bias = -rates[:, None, None] * abs(at[:, None] - at[None, :])
    return replace(problem, arrays={**problem.arrays, "bias": draw.array(np.broadcast_to(bias, (2, 4, 70, 70)))})


def _cached(draw: Draw, rest: float) -> Problem:
    """One query against a cache of 65,536, of which 40,000 keys are there and the rest is multiplied by a number."""
    problem = attention(draw, 1, 65536, 16, "mask", heads=1, batch=1)
    arrays = {name: each.copy() for name, each in problem.arrays.items()}
    arrays["mask"][...] = np.arange(65536) < 40000
    for name in ("key", "value"):
        arrays[name][..., 40000:, :] *= arrays[name].dtype.type(rest)
    return replace(problem, arrays=arrays)


def _other_dtype(problem: Problem, draw: Draw) -> Sequence[Problem]:
    """The same call in the other dtypes."""
    kinds: list[Any] = [np.dtype(np.float16), np.dtype(np.float32)]
    mine = problem.arrays["query"].dtype
    return [
        replace(problem, arrays={name: each.astype(kind) for name, each in problem.arrays.items()})
        for kind in kinds
        if kind != mine
    ]


def _stored(problem: Problem, **memory: str) -> Problem:
    return replace(problem, memory=memory)


def _case(
    name: str, line: int, shows: str, inputs: Callable[[Draw], Problem], bound: Bound = ordinary, **more: Any
) -> Case:
    return Case(name, line, shows, inputs, bound=bound, compiled=(), **more)


PROPERTIES: tuple[Case, ...] = (
    _case("decoding-equals-prefill", 3, "A query alone with the keys up to its own gives its row of the whole.",
          _steps, measure="decoded"),
    _case("sample-alone", 10, "A sample alone gives what it gives among others.", _of_heads, measure="batch"),
    _case("large-sample-among-others", 10, "A sample of large numbers changes no other.",
          lambda d: _among_others(d, 24.0), hard),
    _case("large-head-among-others", 10, "A head of large numbers changes no other.",
          lambda d: _among_others(d, 24.0, head=True), hard),
    _case("nan-sample-among-others", 5, "A sample of NaN makes no other NaN.", lambda d: _among_others(d, math.nan)),
    _case("nan-head-among-others", 5, "A head of NaN makes no other NaN.",
          lambda d: _among_others(d, math.nan, head=True)),
    _case("reordered-keys", 10, "The order of keys does not matter, with blocks of low scores anywhere.",
          _reordered, hard),
    _case("merged-pieces", 10, "Outputs of pieces, weighted by their logsumexp, give that of the whole.",
          lambda d: attention(d, 20, 130, 64, return_logsumexp=True), parts, measure="merged"),
    _case("window-of-its-own", 2, "A window of 9 keys to the left and 5 to the right, by its own keyword.",
          lambda d: _window(d, 9, 5), measure="windowed"),
    _case("window-of-its-own-past", 2, "A window of 16 keys to the left and none to the right, by its own keyword.",
          lambda d: _window(d, 16, 0), measure="windowed"),
    _case("window-of-its-own-200", 2, "A window of 70 keys to the left across blocks, by its own keyword.",
          lambda d: _window(d, 70, 0, queries=200), measure="windowed"),
    _case("alibi-of-its-own", 7, "ALiBi: minus a rate times the distance of query and key.",
          _alibi, measure="by distance"),
    _case("dropout-of-its-own", 11, "Dropout leaves out the share it should, scales the rest, and differs by call.",
          lambda d: attention(d, 64, 64, 64), measure="dropped"),
    _case("twice-of-200", 10, "Equal calls with several blocks of queries and keys: the same bits.",
          lambda d: attention(d, 200, 200, 64), measure="twice"),
    _case("after-other-dtype", 10, "A call after others of the same shapes in another dtype.",
          lambda d: attention(d, 21, 35, 32), before=_other_dtype),
    _case("as-the-first-call", 10, "A call of the shapes that the first call of the run had.",
          lambda d: attention(d, 64, 64, 64, heads=4)),
    _case("many-samples", 10, "270 samples.", lambda d: attention(d, 2, 3, 16, heads=1, batch=270)),
    _case("long-decode", 5, "One query sees 40,000 keys of a cache of 65,536 whose rest is NaN.",
          lambda d: _cached(d, math.nan), hard),
    _case("long-stale-cache", 1, "One query sees 40,000 keys of a cache of 65,536 whose rest is another text's.",
          lambda d: _cached(d, 1.0), hard),
    _case("memory-bias", 10, "The bias is a transposed view.",
          lambda d: _stored(_with_bias(d), bias="transposed")),
    _case("memory-mask-expanded", 10, "The mask is expanded over the batch, with a stride of 0.",
          lambda d: _stored(_equal_masks(attention(d, 18, 34, 32, "mask")), mask="expanded")),
    _case("memory-query-expanded", 10, "The query is expanded over the batch, with a stride of 0.",
          lambda d: _stored(_equal_queries(attention(d, 18, 34, 32)), query="expanded")),
    _case("gradient-memory-stride", 10, "Gradients of arrays whose last axis has a stride.", measure="gradient",
          inputs=lambda d: _stored(attention(d, 18, 34, 32, gradient=True),
                                   **dict.fromkeys(("query", "key", "value"), "every-second"))),
    _case("gradient-memory-misaligned", 10, "Gradients of arrays that start one element after their buffers.",
          measure="gradient",
          inputs=lambda d: _stored(attention(d, 18, 34, 32, gradient=True),
                                   **dict.fromkeys(("query", "key", "value", "cotangent"), "offset"))),
    _case("gradient-of-one-array", 10, "The gradient of one array alone is that among the others.",
          measure="apart", inputs=lambda d: attention(d, 20, 34, 32, gradient=True)),
    _case("gradient-after-other-forward", 10, "Gradients of a call, after another call came between.",
          measure="between", inputs=lambda d: attention(d, 20, 34, 32, gradient=True)),
    _case("gradient-of-one-graph-twice", 10, "A second backward pass through one graph gives the same gradients.",
          measure="repeated", inputs=lambda d: attention(d, 20, 34, 32, gradient=True)),
    _case("memory-one-array", 10, "Query, key and value are one array.", lambda d: _one_array(d)),
    _case("gradient-memory-one-array", 10, "Gradients where query, key and value are one array.", measure="gradient",
          inputs=lambda d: _one_array(d, gradient=True)),
    _case("gradient-samples", 10, "Gradients of five samples of lengths of their own.", measure="gradient",
          inputs=lambda d: attention(d, 20, 34, 32, "lengths", batch=5, gradient=True)),
    _case("gradient-more-queries", 10, "Gradients with more queries than keys.", measure="gradient",
          inputs=lambda d: attention(d, 130, 34, 32, gradient=True)),
)  # fmt: skip
"""Properties, for subjects."""


def _with_bias(draw: Draw) -> Problem:
    problem = attention(draw, 18, 34, 32)
    return replace(problem, arrays={**problem.arrays, "bias": draw.normal(2, 2, 18, 34)})


def _one_array(draw: Draw, *, gradient: bool = False) -> Problem:
    problem = attention(draw, 33, 33, 32, "causal", gradient=gradient)
    query = problem.arrays["query"]
    arrays = {**problem.arrays, "key": query, "value": query}
    return replace(problem, arrays=arrays, memory={"key": "query", "value": "query"})


def _equal_masks(problem: Problem) -> Problem:
    mask = np.repeat(problem.arrays["mask"][:1], 2, axis=0)
    return replace(problem, arrays={**problem.arrays, "mask": mask})


def _equal_queries(problem: Problem) -> Problem:
    query = np.repeat(problem.arrays["query"][:1], 2, axis=0)
    return replace(problem, arrays={**problem.arrays, "query": query})
