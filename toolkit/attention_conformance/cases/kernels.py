"""Cases at the sizes of kernels: edges of blocks, decoding, memory, and calls one after the other.

They are for attentions of anybody. Values have both signs, and sizes differ as far as a kernel allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from attention_conformance.cases.case import Case, Draw, case, exact_scores, hard, long, probability
from attention_conformance.cases.contract import MASK
from attention_conformance.problem import NumpyArray, Problem, Rule

ARRAYS = ("query", "key", "value")
AT: Any = np.s_

MASKS = ("maskbhm", "mask", "maskhm", "maskm", "maskbh", "maskb", "maskh")
"""Masks, by the axes that they have besides that of the keys: samples, heads, and queries; `mask` has no heads."""

row = partial(case, compiled=())
"""A case for anybody's attention."""

gradient = partial(row, measure="gradient")
"""The same, about gradients."""


def attention(
    draw: Draw, queries: int, keys: int, width: int = 32, rule: str = "plain", *, heads: int = 2, groups: int = 0,
    batch: int = 2, value_width: int = 0, gradient: bool = False, deviation: float = 1.0, **options: Any,
) -> Problem:  # fmt: skip
    """A problem of a kernel's size under a rule: plain, causal, chunk, lengths, ragged, bias, or one of `MASKS`."""
    groups, value_width = groups or heads, value_width or width
    shapes = {"query": (heads, queries, width), "key": (groups, keys, width), "value": (groups, keys, value_width)}
    arrays = {name: draw.normal(batch, *shape, deviation=deviation) for name, shape in shapes.items()}
    if rule in ("lengths", "ragged"):
        lengths = np.linspace(keys // 2 + 1, keys, batch).astype(int)
        arrays["mask"] = np.arange(keys) < lengths[:, None, None, None]
    if rule in MASKS:
        axes = rule.removeprefix("mask") or "bm"
        over = (size if axis in axes else 1 for axis, size in {"b": batch, "h": heads, "m": queries}.items())
        arrays["mask"] = draw.mask(*over, keys, share=0.5)
    if rule == "bias":
        arrays["bias"] = draw.normal(1, heads, queries, keys)
    if rule in ("causal", "ragged"):
        options["is_causal"] = True
    mask = MASK if "mask" in arrays else None
    if rule == "chunk":
        mask = Rule("Causal", {"offset": max(keys - queries, 0)})
    return Problem(arrays, mask, options, draw.normal(batch, heads, queries, value_width) if gradient else None)


def sized(*sizes: Any, **options: Any) -> Callable[[Draw], Problem]:
    """Inputs of these sizes, as `attention` takes them."""
    return lambda draw: attention(draw, *sizes, **options)


def cached(draw: Draw, queries: int, keys: int, left: int, **sizes: Any) -> Problem:
    """No query may attend to keys and values after so many, which are NaN."""
    problem = attention(draw, queries, keys, rule="mask", **sizes).put("mask", ..., np.arange(keys) < left)
    return problem.put("key", AT[..., left:, :], math.nan).put("value", AT[..., left:, :], math.nan)


def _first_block_hidden(draw: Draw) -> Problem:
    """The first 64 keys are hidden from some queries, and all other scores are about -20."""
    problem = attention(draw, 24, 200, 32, "mask").put("mask", ..., True)
    problem = problem.put("mask", AT[..., ::2, :64], False).put("mask", AT[..., ::3, 64:128], False)
    return problem.put("query", AT[..., 0], 8.0).put("key", AT[..., 0], -14.0)


def _empty_rows(draw: Draw, *, gradient: bool = False) -> Problem:
    """Fully masked rows among others, on both sides of the edge of a block."""
    problem = attention(draw, 70, 130, 32, "mask", gradient=gradient)
    return problem.put("mask", AT[..., [0, 63, 64, 69], :], False)


def _biased_by(draw: Draw, *shape: int) -> Problem:
    return attention(draw, 20, 34, 32, heads=3, gradient=True).holding(bias=draw.normal(*shape))


def _sinks(draw: Draw, *sizes: Any, groups: int = 2, gradient: bool = False) -> Problem:
    problem = attention(draw, *(sizes or (70, 130, 32, "causal")), heads=6, groups=groups, gradient=gradient)
    return problem.holding(sinks=draw.normal(6))


def _rising(draw: Draw, sign: float) -> Problem:
    """Scores that grow, or fall, from key to key, so that every block has another maximum."""
    problem = attention(draw, 5, 300, 32).put("query", AT[..., 0], 4.0)
    return problem.put("key", AT[..., 0], draw.array(sign * np.linspace(0.0, 24.0, 300)))


def _shifted(draw: Draw, score: float, *, gradient: bool = False) -> Problem:
    """Scores about a number that is far from 0."""
    problem = attention(draw, 17, 96, 64, gradient=gradient)
    # The last channel, as each term that is added to a large one is rounded like it.
    return problem.put("query", AT[..., -1], 8.0).put("key", AT[..., -1], score)


def window(
    draw: Draw, queries: int, left: int, right: int = 0, width: int = 32, more: int = 0, **sizes: Any
) -> Problem:
    """So many keys to the left and to the right of each query's own, and more keys than queries."""
    problem, at = attention(draw, queries, queries + more, width, "mask", **sizes), np.arange(queries + more)
    rows = at[:queries, None]
    return problem.put("mask", ..., (at >= rows - left) & (at <= rows + right))


def _lowest_bias(draw: Draw) -> Problem:
    """A bias that is the least finite number for all keys of some queries, whose scores are 0."""
    problem, rows = attention(draw, 20, 34, 32, gradient=True), AT[..., [0, 7, 19], :]
    problem = problem.put("query", rows, 0.0).holding(bias=draw.normal(2, 20, 34))
    return problem.put("bias", rows, -65504.0 if draw.dtype == "float16" else -3e38)


def _sentinel(draw: Draw) -> Problem:
    """Scores of powers of 2, so that they are exact in all types."""
    problem = attention(draw, 17, 96, 64).put("query", ..., 0.0).put("key", ..., 0.0)
    problem = problem.put("query", AT[..., :2], (4096.0, 4.0)).put("key", AT[..., 0], -128.0)
    return problem.put("key", AT[..., 1], draw.array(draw.signs(2, 2, 96)))


def _one_sign(draw: Draw) -> Problem:
    """Equal weights of values about 1, so that sums grow with every key."""
    problem = attention(draw, 1, 32768, 16, heads=1, batch=1, deviation=0.25).put("query", ..., 0.0)
    return problem.holding(value=draw.array(1.0 + problem.arrays["value"].astype(np.float64)))


def in_memory(problem: Problem, kind: str, *names: str) -> Problem:
    """Arrays that lie otherwise in memory; as a stride of 0 has them, all samples, or heads, are the first."""
    axis = {"expanded": 0, "shared": 1}.get(kind)
    if axis is None:
        return problem.changed(memory=dict.fromkeys(names, kind))
    arrays = {**problem.arrays, **({} if problem.cotangent is None else {"cotangent": problem.cotangent})}
    arrays |= {n: np.repeat(arrays[n].take([0], axis), arrays[n].shape[axis], axis) for n in names if n in arrays}
    cotangent = arrays.pop("cotangent", None)
    return problem.changed(arrays=arrays, cotangent=cotangent, memory=dict.fromkeys(names, kind))


def asking(case: Case, problem: Problem, seed: int) -> Sequence[Problem]:
    """The problems that are called before the one of a case."""
    return () if case.before is None else case.before(problem, Draw("float64", seed, case.name + "-before"))


def _other_values(problem: Problem, draw: Draw) -> Sequence[Problem]:
    """The same shapes and options with other numbers."""
    return [problem.changed(arrays={name: _other(each, draw) for name, each in problem.arrays.items()})]


def _other(each: NumpyArray, draw: Draw) -> NumpyArray:
    return ~each if each.dtype == bool else draw.normal(*each.shape).astype(each.dtype)


def _cut(problem: Problem, rows: int, columns: int) -> Problem:
    ends = {"query": (rows, None), "key": (columns, None), "value": (columns, None)}
    arrays = {}
    for name, array in problem.arrays.items():
        row, column = ends.get(name, (rows, columns))
        arrays[name] = array[..., :row, :column]
    return problem.changed(arrays=arrays)


KERNELS: tuple[Case, ...] = (
    row("decode-nan-cache", lambda d: cached(d, 1, 128, 66)),
    row("sinks-grouped-130", _sinks, probability),
    row("sinks-1x1100", lambda d: _sinks(d, 1, 1100, groups=6), probability),
    row("sinks-65x1025", lambda d: _sinks(d, 65, 1025), probability),
    row("softcap-65x1025", sized(65, 1025, 64, softcap=1.5)),
    row("softcap-130", sized(70, 130, 32, "causal", softcap=1.5)),
    gradient("gradient-sinks-grouped-130", partial(_sinks, gradient=True), probability),
    gradient("gradient-softcap-130", sized(70, 130, 32, "causal", softcap=1.5, gradient=True)),
    gradient("gradient-negative-scale", sized(20, 34, 32, scale=-0.25, gradient=True), hard),
    row("padding-nan", lambda d: cached(d, 20, 130, 70)),
    row("mask-all-true", lambda d: attention(d, 20, 66, 32).holding(mask=np.ones((2, 1, 20, 66), dtype=bool))),
    row("mask-of-queries", lambda d: attention(d, 70, 130, 32, heads=3).holding(mask=np.ones((2, 1, 70, 1), dtype=bool))
        .put("mask", AT[:, :, [0, 5, 63, 64]], False)),
    row("bias-130", lambda d: attention(d, 40, 130, 32).holding(bias=d.normal(2, 2, 40, 130, deviation=3.0))),
    row("first-block-hidden", _first_block_hidden),
    row("band-300", lambda d: window(d, 300, 9, width=16, batch=1)),
    row("empty-rows-130", _empty_rows),
    gradient("gradient-empty-rows-130", partial(_empty_rows, gradient=True)),
    gradient("gradient-bias-of-samples", lambda d: _biased_by(d, 2, 1, 20, 34)),
    gradient("gradient-bias-of-keys", lambda d: _biased_by(d, 1, 3, 1, 34)),
    gradient("gradient-lowest-bias", _lowest_bias, exact_scores),
    row("nan-query", lambda d: attention(d, 20, 34, 32).put("query", (..., 3, 5), math.nan)),
    row("rising-scores", lambda d: _rising(d, 1.0), hard),
    row("falling-scores", lambda d: _rising(d, -1.0), hard),
    row("scores-below-minus-100", lambda d: _shifted(d, -128.0), hard),
    row("scores-above-100", lambda d: _shifted(d, 128.0), hard),
    row("scores-below-the-sentinel", _sentinel, exact_scores),
    gradient("gradient-scores-below-minus-100", lambda d: _shifted(d, -128.0, gradient=True), hard),
    row("negative-scale", sized(20, 34, 32, scale=-0.25)),
    row("negative-scale-causal", sized(20, 20, 32, "causal", scale=-0.25)),
    row("negative-scale-mask", sized(20, 34, 32, "mask", scale=-0.25)),
    row("average-32768", _one_sign, long),
    gradient("gradient-memory-cotangent-expanded",
             lambda d: in_memory(attention(d, 18, 34, 32, gradient=True), "expanded", "cotangent")),
    row("twice", sized(33, 70, 32, "causal"), measure="twice"),
    gradient("gradient-twice", sized(20, 34, 32, gradient=True), before=lambda p, _: [p]),
    row("after-other-mask", sized(20, 34, 32, "mask"), before=_other_values),
    row("after-no-mask", sized(20, 34, 32, "mask"), before=lambda p, _: [p.without("mask")]),
    row("after-other-options", sized(33, 33, 32, "causal"),
        before=lambda p, _: [p.changed(options={"scale": 0.5}), p.changed(options={})]),
    row("after-other-memory", sized(20, 34, 32, heads=3),
        before=lambda p, _: [p.changed(memory=dict.fromkeys(ARRAYS, "permuted"))]),
    row("after-shorter", sized(66, 66, 32, "causal"), before=lambda p, _: [_cut(p, 20, 20), _cut(p, p.sizes[2], 20)]),
    row("memory-is-freed", sized(64, 512, 64), measure="freed", dtypes=("float32",)),
)  # fmt: skip
"""Cases at the sizes of kernels."""
