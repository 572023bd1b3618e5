"""Cases at the sizes of kernels: edges of blocks, decoding, memory, and calls one after the other.

They are for attentions of anybody. Values have both signs, and sizes differ as far as a kernel allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attention_conformance.cases.case import Bound, Case, Draw, exact_scores, hard, long, ordinary, probability
from attention_conformance.cases.contract import MASK, with_element
from attention_conformance.problem import NumpyArray, Problem

__all__ = ["KERNELS", "asking"]

LADDER = (
    # queries = keys, width, rule: every edge of a block with some width and some rule
    (1, 16, "plain"),
    (13, 32, "causal"),
    (16, 64, "mask"),
    (31, 80, "plain"),
    (33, 96, "causal"),
    (63, 128, "mask"),
    (64, 16, "causal"),
    (65, 32, "plain"),
    (65, 64, "causal"),
    (96, 72, "mask"),
    (127, 64, "lengths"),
    (128, 32, "plain"),
    (128, 64, "causal"),
    (129, 16, "mask"),
    (129, 64, "causal"),
    (192, 64, "lengths"),
    (257, 32, "causal"),
    (300, 64, "plain"),
    (300, 32, "causal"),
    (33, 192, "causal"),
    (40, 256, "plain"),
    (33, 40, "plain"),
    (20, 48, "mask"),
    (65, 112, "causal"),
    (34, 160, "lengths"),
)
CROSS = (
    # queries, keys, rule
    (1, 7, "plain"),
    (1, 130, "plain"),
    (3, 129, "lengths"),
    (65, 130, "causal"),
    (130, 65, "causal"),
    (130, 65, "mask"),
    (70, 200, "mask"),
)


def attention(
    draw: Draw, queries: int, keys: int, width: int = 32, rule: str = "plain", *, heads: int = 2, groups: int = 0,
    batch: int = 2, gradient: bool = False, deviation: float = 1.0, **options: Any,
) -> Problem:  # fmt: skip
    """A problem of a kernel's size under one of four rules."""
    shapes = {"query": (heads, queries), "key": (groups or heads, keys), "value": (groups or heads, keys)}
    arrays = {name: draw.normal(batch, *shape, width, deviation=deviation) for name, shape in shapes.items()}
    cotangent = draw.normal(batch, heads, queries, width) if gradient else None
    mask = None
    if rule == "mask":
        arrays["mask"], mask = draw.mask(batch, 1, queries, keys, share=0.5), MASK
        arrays["mask"][..., np.arange(queries), np.arange(queries) % keys] = True
    if rule == "lengths":
        lengths = np.linspace(keys // 2 + 1, keys, batch).astype(int)
        arrays["mask"], mask = np.arange(keys) < lengths[:, None, None, None], MASK
    if rule == "causal":
        options["is_causal"] = True
    return Problem(arrays, mask, options, cotangent)


def _padded(draw: Draw, queries: int, keys: int, left: int) -> Problem:
    """No query may attend to keys and values after so many."""
    problem = attention(draw, queries, keys, rule="mask")
    mask = np.broadcast_to(np.arange(keys) < left, (2, 1, queries, keys)).copy()
    return replace(problem, arrays={**problem.arrays, "mask": mask})


def _nan_padding(draw: Draw, queries: int, keys: int, left: int) -> Problem:
    """The same, and these keys and values are NaN."""
    problem = _padded(draw, queries, keys, left)
    arrays = dict(problem.arrays)
    for name in ("key", "value"):
        arrays[name] = arrays[name].copy()
        arrays[name][..., left:, :] = math.nan
    return replace(problem, arrays=arrays)


def _first_block_hidden(draw: Draw) -> Problem:
    """The first 64 keys are hidden from some queries, and all other scores are about -20."""
    problem = attention(draw, 24, 200, 32, "mask")
    arrays = {name: each.copy() for name, each in problem.arrays.items()}
    arrays["mask"][...] = True
    arrays["mask"][..., ::2, :64] = False
    arrays["mask"][..., ::3, 64:128] = False
    arrays["query"][..., 0], arrays["key"][..., 0] = 8.0, -14.0
    return replace(problem, arrays=arrays)


def _empty_rows(draw: Draw, *, gradient: bool = False) -> Problem:
    """Fully masked rows among others, on both sides of the edge of a block."""
    problem = attention(draw, 70, 130, 32, "mask", gradient=gradient)
    mask = problem.arrays["mask"].copy()
    mask[..., [0, 63, 64, 69], :] = False
    return replace(problem, arrays={**problem.arrays, "mask": mask})


def _biased(draw: Draw, problem: Problem) -> Problem:
    (*batch, heads, rows, _), columns = problem.arrays["query"].shape, problem.arrays["key"].shape[-2]
    return replace(problem, arrays={**problem.arrays, "bias": draw.normal(*batch, heads, rows, columns)})


def _with_sinks(draw: Draw, problem: Problem) -> Problem:
    return replace(problem, arrays={**problem.arrays, "sinks": draw.normal(problem.arrays["query"].shape[-3])})


def _mask_of(draw: Draw, *shape: int, gradient: bool = False) -> Problem:
    batch = shape[0] if shape[0] > 1 else 3
    problem = attention(draw, 70, 130, 32, heads=3, batch=batch, gradient=gradient)
    mask = draw.mask(*shape, share=0.6)
    mask[..., min(1, shape[-1] - 1)] = True
    return replace(problem, arrays={**problem.arrays, "mask": mask}, mask=MASK)


def _mask_of_queries(draw: Draw) -> Problem:
    problem = _mask_of(draw, 2, 1, 70, 1)
    mask = problem.arrays["mask"].copy()
    mask[:, :, [0, 5, 63, 64]] = False
    return replace(problem, arrays={**problem.arrays, "mask": mask})


def _biased_by(draw: Draw, *shape: int) -> Problem:
    problem = attention(draw, 20, 34, 32, heads=3, gradient=True)
    return replace(problem, arrays={**problem.arrays, "bias": draw.normal(*shape)})


def _rising(draw: Draw, sign: float) -> Problem:
    """Scores that grow, or fall, from key to key, so that every block has another maximum."""
    problem = attention(draw, 5, 300, 32)
    key = problem.arrays["key"].astype(np.float64)
    key[..., 0] = sign * np.linspace(0.0, 24.0, 300)
    query = problem.arrays["query"].astype(np.float64)
    query[..., 0] = 4.0
    arrays = {**problem.arrays, "query": draw.array(query), "key": draw.array(key)}
    return replace(problem, arrays=arrays)


def _shifted(draw: Draw, score: float, *, gradient: bool = False, keys: int = 96) -> Problem:
    """Scores about a number that is far from 0."""
    problem = attention(draw, 17, keys, 64, gradient=gradient)
    arrays = {name: each.copy() for name, each in problem.arrays.items()}
    arrays["query"][..., -1] = 8.0  # the last, as each term that is added to a large one is rounded like it
    arrays["key"][..., -1] = score
    return replace(problem, arrays=arrays)


def _band(draw: Draw) -> Problem:
    """A band of 10 keys among 300: most blocks of a row are hidden."""
    problem = attention(draw, 300, 300, 16, "mask", batch=1)
    at = np.arange(300)
    mask = (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - 10)
    return replace(problem, arrays={**problem.arrays, "mask": mask[None, None]})


def _large_bias(draw: Draw) -> Problem:
    problem = attention(draw, 40, 130, 32)
    return replace(problem, arrays={**problem.arrays, "bias": draw.normal(2, 2, 40, 130, deviation=3.0)})


def _all_true(draw: Draw) -> Problem:
    problem = attention(draw, 20, 66, 32)
    return replace(problem, arrays={**problem.arrays, "mask": np.ones((2, 1, 20, 66), dtype=bool)}, mask=MASK)


def _mask_and_causal(draw: Draw, *, gradient: bool = False) -> Problem:
    problem = attention(draw, 130, 130, 32, "mask", gradient=gradient)
    return replace(problem, options={"is_causal": True})


def _lowest_bias(draw: Draw) -> Problem:
    """A bias that is the least finite number for all keys of some queries, whose scores are 0."""
    problem, rows = attention(draw, 20, 34, 32, gradient=True), [0, 7, 19]
    query, bias = problem.arrays["query"].copy(), draw.normal(2, 20, 34)
    query[..., rows, :] = 0.0
    bias[:, rows] = -65504.0 if draw.dtype == "float16" else -3e38
    return replace(problem, arrays={**problem.arrays, "query": query, "bias": bias})


def _sentinel(draw: Draw) -> Problem:
    """Scores of powers of 2, so that they are exact in all types."""
    problem = attention(draw, 17, 96, 64)
    arrays = {name: each.copy() for name, each in problem.arrays.items()}
    arrays["query"][...], arrays["key"][...] = 0.0, 0.0
    arrays["query"][..., 0] = 4096.0
    arrays["key"][..., 0] = -128.0
    arrays["query"][..., 1], arrays["key"][..., 1] = 4.0, draw.array(draw.signs(2, 2, 96))
    return replace(problem, arrays=arrays)


def _one_sign(draw: Draw) -> Problem:
    """Values about 1 with small scores, so that sums grow with every key."""
    problem = attention(draw, 4, 1100, 32, deviation=0.5)
    value = 1.0 + 0.25 * problem.arrays["value"].astype(np.float64)
    return replace(problem, arrays={**problem.arrays, "value": draw.array(value)})


def _stored(problem: Problem, **memory: str) -> Problem:
    return replace(problem, memory=memory)


def _equal_samples(problem: Problem, *names: str) -> Problem:
    """The arrays of the first sample for all, as arrays with a stride of 0 hold them."""
    arrays = {
        name: np.repeat(each[:1], each.shape[0], axis=0) if name in names else each
        for name, each in problem.arrays.items()
    }
    cotangent = problem.cotangent
    if cotangent is not None and "cotangent" in names:
        cotangent = np.repeat(cotangent[:1], cotangent.shape[0], axis=0)
    return replace(problem, arrays=arrays, cotangent=cotangent)


def asking(case: Case, problem: Problem, seed: int) -> Sequence[Problem]:
    """The problems that are called before the one of a case."""
    return () if case.before is None else case.before(problem, Draw("float64", seed, case.name + "-before"))


def _again(problem: Problem, draw: Draw) -> Sequence[Problem]:
    return [problem]


def _other_values(problem: Problem, draw: Draw) -> Sequence[Problem]:
    """The same shapes and options with other numbers."""
    arrays = {name: _other(each, draw) for name, each in problem.arrays.items()}
    return [replace(problem, arrays=arrays)]


def _other(each: NumpyArray, draw: Draw) -> NumpyArray:
    return ~each if each.dtype == bool else draw.normal(*each.shape).astype(each.dtype)


def _other_options(problem: Problem, draw: Draw) -> Sequence[Problem]:
    """The same arrays, at another scale and without causality."""
    return [replace(problem, options={"scale": 0.5}), replace(problem, options={})]


def _other_memory(problem: Problem, draw: Draw) -> Sequence[Problem]:
    return [replace(problem, memory=dict.fromkeys(("query", "key", "value"), "permuted"))]


def _without_mask(problem: Problem, draw: Draw) -> Sequence[Problem]:
    arrays = {name: each for name, each in problem.arrays.items() if name != "mask"}
    return [replace(problem, arrays=arrays, mask=None)]


def _shorter(problem: Problem, draw: Draw) -> Sequence[Problem]:
    """Fewer queries and keys, as the calls of a generation have; and fewer keys alone."""
    return [_cut(problem, 20, 20), _cut(problem, problem.sizes[2], 20)]


def _cut(problem: Problem, rows: int, columns: int) -> Problem:
    ends = {"query": (rows, None), "key": (columns, None), "value": (columns, None)}
    arrays = {}
    for name, each in problem.arrays.items():
        row, column = ends.get(name, (rows, columns))
        arrays[name] = each[..., :row, :column]
    return replace(problem, arrays=arrays)


def _case(
    name: str, line: int, shows: str, inputs: Callable[[Draw], Problem], bound: Bound = ordinary, **more: Any
) -> Case:
    return Case(name, line, shows, inputs, bound=bound, compiled=(), **more)


GRADIENTS = (
    (5, 16, "plain"),
    (65, 32, "causal"),
    (64, 64, "plain"),
    (129, 32, "causal"),
    (130, 64, "mask"),
    (70, 32, "lengths"),
    (33, 128, "causal"),
    (20, 256, "plain"),
    (300, 16, "causal"),
)
LINES_OF_RULES = {"causal": 3, "mask": 1, "lengths": 2, "plain": 10}


def _ladder() -> list[Case]:
    cases = []
    for size, width, rule in LADDER:
        shows = f"{size} queries and keys, D = {width}: the edges of blocks ({rule})."
        inputs = partial(attention, queries=size, keys=size, width=width, rule=rule)
        cases.append(_case(f"ladder-{size}x{width}-{rule}", LINES_OF_RULES[rule], shows, inputs))
    for size in (530, 1030):
        inputs = partial(attention, queries=size, keys=size, width=16, rule="causal", heads=1, batch=1)
        cases.append(_case(f"ladder-{size}x16-causal", 3, f"{size} queries and keys of one head (causal).", inputs))
    for queries, keys, rule in CROSS:
        inputs = partial(attention, queries=queries, keys=keys, rule=rule)
        shows = f"{queries} queries and {keys} keys ({rule})."
        cases.append(_case(f"cross-{queries}x{keys}-{rule}", LINES_OF_RULES[rule], shows, inputs))
    for size, width, rule in GRADIENTS:
        inputs = partial(attention, queries=size, keys=size, width=width, rule=rule, gradient=True)
        shows = f"Gradients with {size} queries and keys, D = {width} ({rule})."
        cases.append(_case(f"gradient-ladder-{size}x{width}-{rule}", 10, shows, inputs, measure="gradient"))
    return cases


def _in_memory(draw: Draw, memory: dict[str, str]) -> Problem:
    return _stored(attention(draw, 18, 34, heads=3), **memory)


def _memory() -> list[Case]:
    cases = []
    every = dict.fromkeys(("query", "key", "value"), "permuted")
    kinds: dict[str, tuple[str, dict[str, str]]] = {
        "permuted": ("Query, key and value are views with heads and positions permuted", every),
        "permuted-query": ("The query alone is a permuted view", {"query": "permuted"}),
        "permuted-key": ("The key alone is a permuted view", {"key": "permuted"}),
        "permuted-value": ("The value alone is a permuted view", {"value": "permuted"}),
        "interleaved": ("Query, key and value are views of packed projections", dict.fromkeys(every, "interleaved")),
        "inner-stride": ("The last axis has a stride", dict.fromkeys(every, "every-second")),
        "inner-stride-value": ("The last axis of the value alone has a stride", {"value": "every-second"}),
        "transposed-key": ("The key lies as its transpose", {"key": "transposed"}),
        "part-of-cache": ("Key and value are the first part of a longer buffer", {"key": "part", "value": "part"}),
        "misaligned": ("Arrays start one element after their buffers", dict.fromkeys(every, "offset")),
    }  # fmt: skip
    for name, (shows, memory) in kinds.items():
        cases.append(_case(f"memory-{name}", 10, f"{shows}.", partial(_in_memory, memory=memory)))
    shared = ("key", "value")
    cases += [
        _case("memory-expanded", 10, "Key and value are expanded over the batch, with a stride of 0.",
              lambda d: _stored(_equal_samples(attention(d, 18, 34, 32), *shared), key="expanded", value="expanded")),
        _case("memory-mask", 10, "The mask is a transposed view.",
              lambda d: _stored(attention(d, 18, 34, 32, "mask"), mask="transposed")),
        _case("gradient-memory", 10, "Gradients of permuted views.", measure="gradient",
              inputs=lambda d: _stored(attention(d, 18, 34, 32, heads=3, gradient=True), **every)),
        _case("gradient-memory-cotangent", 10, "The gradient of the output is a permuted view.", measure="gradient",
              inputs=lambda d: _stored(attention(d, 18, 34, 32, heads=3, gradient=True), cotangent="permuted")),
        _case("gradient-memory-cotangent-stride", 10, "The last axis of the output's gradient has a stride.",
              measure="gradient",
              inputs=lambda d: _stored(attention(d, 18, 34, 32, gradient=True), cotangent="every-second")),
        _case("gradient-memory-cotangent-expanded", 10, "The gradient of the output is expanded, as that of a sum.",
              measure="gradient",
              inputs=lambda d: _stored(_equal_samples(attention(d, 18, 34, 32, gradient=True), "cotangent"),
                                       cotangent="expanded")),
    ]  # fmt: skip
    return cases


KERNELS: tuple[Case, ...] = (
    *_ladder(),
    _case("decode-grouped", 9, "One query against 130 keys, with 8 query heads on 2 key heads.",
          lambda d: attention(d, 1, 130, 64, heads=8, groups=2)),
    _case("decode-causal", 3, "One query under causality sees what the convention says.",
          lambda d: attention(d, 1, 66, 32, "causal")),
    _case("decode-chunk", 3, "Three queries under causality against a cache of 67.",
          lambda d: attention(d, 3, 67, 32, "causal")),
    _case("decode-nan-cache", 5, "One query sees 66 keys of a cache of 128 whose rest is NaN.",
          lambda d: _nan_padding(d, 1, 128, 66)),
    _case("decode-stale-cache", 1, "One query sees 66 keys of a cache of 128 whose rest is another text's.",
          lambda d: _padded(d, 1, 128, 66)),
    _case("grouped-65", 9, "6 query heads on 2 key heads across the edge of a block.",
          lambda d: attention(d, 65, 70, 32, heads=6, groups=2)),
    _case("grouped-64", 9, "4 query heads on 2 key heads, in whole blocks.",
          lambda d: attention(d, 64, 128, 64, heads=4, groups=2), hard),
    _case("sinks-grouped-130", 7, "Sinks of 6 query heads on 2 key heads, counted once for several blocks of keys.",
          lambda d: _with_sinks(d, attention(d, 70, 130, 32, "causal", heads=6, groups=2)), probability),
    _case("softcap-130", 7, "Softcap for several blocks of keys.",
          lambda d: attention(d, 70, 130, 32, "causal", softcap=1.5)),
    _case("gradient-sinks-grouped-130", 7, "The gradients in these sinks, and next to them.", measure="gradient",
          bound=probability,
          inputs=lambda d: _with_sinks(d, attention(d, 70, 130, 32, "causal", heads=6, groups=2, gradient=True))),
    _case("gradient-softcap-130", 7, "The gradients through the softcap for several blocks of keys.",
          measure="gradient", inputs=lambda d: attention(d, 70, 130, 32, "causal", softcap=1.5, gradient=True)),
    _case("gradient-negative-scale", 7, "The gradients with a scale below 0.", measure="gradient", bound=hard,
          inputs=lambda d: attention(d, 20, 34, 32, scale=-0.25, gradient=True)),
    _case("gradient-mask-of-heads", 1, "The gradients with a mask for every sample and head.", measure="gradient",
          bound=hard, inputs=lambda d: _mask_of(d, 2, 3, 70, 130, gradient=True)),
    _case("one-key-head-65", 9, "5 query heads on one key head.",
          lambda d: attention(d, 33, 65, 32, heads=5, groups=1)),
    _case("gradient-grouped-65", 9, "The gradients of shared key heads add up.", measure="gradient",
          inputs=lambda d: attention(d, 33, 65, 32, "causal", heads=6, groups=2, gradient=True)),
    _case("many-heads", 10, "70 heads of 3 samples.", lambda d: attention(d, 5, 9, 16, heads=70, batch=3)),
    _case("many-grouped-heads", 9, "258 query heads on 2 key heads.",
          lambda d: attention(d, 3, 5, 16, heads=258, groups=2, batch=1)),
    _case("one-sample", 10, "A sample alone.", lambda d: attention(d, 20, 34, 32, heads=3, batch=1)),
    _case("five-samples", 10, "Five samples with lengths of their own.",
          lambda d: attention(d, 20, 34, 32, "lengths", batch=5)),
    _case("padding-nan", 5, "Keys after the first 70 are NaN and masked.", lambda d: _nan_padding(d, 20, 130, 70)),
    _case("mask-all-true", 1, "A mask of True alone changes nothing.",
          _all_true),
    _case("mask-of-keys", 1, "A mask (B, 1, 1, N) is broadcast over heads and queries.",
          lambda d: _mask_of(d, 2, 1, 1, 130)),
    _case("mask-of-samples", 1, "A mask (1, 1, M, N) is broadcast over samples.", lambda d: _mask_of(d, 1, 1, 70, 130)),
    _case("mask-of-queries", 4, "A mask (B, 1, M, 1) hides all keys from some queries.", _mask_of_queries),
    _case("mask-of-heads", 1, "Every head has a mask.", lambda d: _mask_of(d, 2, 3, 70, 130)),
    _case("mask-and-causal-130", 3, "Mask and causality at once: what either hides is hidden.", _mask_and_causal),
    _case("gradient-mask-and-causal-130", 3, "Gradients under mask and causality at once.", measure="gradient",
          inputs=lambda d: _mask_and_causal(d, gradient=True)),
    _case("bias-130", 1, "A bias of large numbers on 130 keys.", _large_bias),
    _case("first-block-hidden", 1, "The first blocks of some rows are hidden, and all other scores are low.",
          _first_block_hidden),
    _case("band-300", 1, "A band of 10 keys among 300.", _band),
    _case("empty-rows-130", 4, "Fully masked rows at the edges of blocks give 0.", _empty_rows),
    _case("gradient-empty-rows-130", 4, "Fully masked rows have no gradient, and give none.", measure="gradient",
          inputs=lambda d: _empty_rows(d, gradient=True)),
    _case("bias-130x65", 1, "A bias of every query in several blocks of them.",
          lambda d: _biased(d, attention(d, 130, 65, 32)), hard),
    _case("gradient-bias-of-samples", 1, "The gradient in a bias (B, 1, M, N) is a sum over heads.",
          measure="gradient", inputs=lambda d: _biased_by(d, 2, 1, 20, 34)),
    _case("gradient-bias-of-keys", 1, "The gradient in a bias (1, H, 1, N) is a sum over samples and queries.",
          measure="gradient", inputs=lambda d: _biased_by(d, 1, 3, 1, 34)),
    _case("gradient-lowest-bias", 4, "Rows of very low scores have the gradients of an average.", bound=exact_scores,
          measure="gradient", inputs=_lowest_bias),
    _case("nan-query", 5, "A query of NaN makes its row NaN, and no other.",
          lambda d: with_element(attention(d, 20, 34, 32), "query", (3, 5), math.nan)),
    _case("rising-scores", 0, "The maximum rises from block to block.", lambda d: _rising(d, 1.0), hard),
    _case("falling-scores", 0, "The maximum is in the first block.", lambda d: _rising(d, -1.0), hard),
    _case("scores-below-minus-100", 0, "All scores are about -128, the logsumexp too.",
          lambda d: _shifted(d, -128.0), hard),
    _case("scores-above-100", 0, "All scores are about 128, whose exponentials overflow.",
          lambda d: _shifted(d, 128.0), hard),
    _case("scores-below-the-sentinel", 0, "All scores are about -60,000, lower than a finite stand-in for -inf.",
          _sentinel, exact_scores),
    _case("gradient-scores-below-minus-100", 0, "Gradients where all scores are about -128.", bound=hard,
          measure="gradient",
          inputs=lambda d: _shifted(d, -128.0, gradient=True)),
    _case("gradient-one-query", 10, "Gradients of one query against 129 keys.", measure="gradient",
          inputs=lambda d: attention(d, 1, 129, 32, gradient=True)),
    _case("gradient-more-keys", 10, "Gradients with fewer queries than keys.", measure="gradient",
          inputs=lambda d: attention(d, 34, 66, 32, gradient=True)),
    _case("negative-scale", 7, "A scale may be negative.", lambda d: attention(d, 20, 34, 32, scale=-0.25)),
    _case("negative-scale-causal", 7, "A negative scale turns no masked score into the largest.",
          lambda d: attention(d, 20, 20, 32, "causal", scale=-0.25)),
    _case("negative-scale-mask", 7, "The same with a mask.",
          lambda d: attention(d, 20, 34, 32, "mask", scale=-0.25)),
    _case("scale-of-65", 7, "A scale of its own across the edge of a block.",
          lambda d: attention(d, 33, 65, 32, scale=0.5)),
    _case("gradient-scale", 7, "Gradients with a scale of its own.", measure="gradient",
          inputs=lambda d: attention(d, 20, 34, 32, scale=0.5, gradient=True)),
    _case("long-keys", 10, "66,000 keys: positions beyond 16 bits.",
          lambda d: attention(d, 2, 66000, 16, heads=1, batch=1), hard),
    _case("long-queries", 10, "66,000 queries.", lambda d: attention(d, 66000, 3, 16, heads=1, batch=1)),
    _case("average-1100", 8, "1,100 values of one sign: sums in a narrow type lose digits.", _one_sign, long),
    *_memory(),
    _case("twice", 10, "The same call, twice: the same bits.",
          lambda d: attention(d, 33, 70, 32, "causal"), measure="twice"),
    _case("gradient-twice", 10, "The gradients of a second, equal call.", measure="gradient", before=_again,
          inputs=lambda d: attention(d, 20, 34, 32, gradient=True)),
    _case("after-other-values", 10, "A call after another of the same shapes.",
          lambda d: attention(d, 33, 33, 32), before=_other_values),
    _case("after-other-mask", 10, "A call after another whose mask is the opposite.",
          lambda d: attention(d, 20, 34, 32, "mask"), before=_other_values),
    _case("after-no-mask", 10, "A call with a mask after one without.",
          lambda d: attention(d, 20, 34, 32, "mask"), before=_without_mask),
    _case("after-other-options", 10, "A call after others with another scale, and without causality.",
          lambda d: attention(d, 33, 33, 32, "causal"), before=_other_options),
    _case("after-other-memory", 10, "A call after another with other strides.",
          lambda d: attention(d, 20, 34, 32, heads=3), before=_other_memory),
    _case("after-shorter", 10, "A call after one with fewer queries and keys.",
          lambda d: attention(d, 66, 66, 32, "causal"), before=_shorter),
    _case("same-memory", 10, "New numbers in the same memory.",
          lambda d: attention(d, 20, 34, 32), measure="overwritten"),
    _case("results-are-kept", 10, "A later call does not change an earlier result.",
          lambda d: attention(d, 20, 34, 32), measure="kept"),
    _case("memory-is-freed", 10, "Many calls keep no memory.", lambda d: attention(d, 64, 512, 64), measure="freed",
          dtypes=("float32",)),
)  # fmt: skip
"""Cases at kernel sizes, for subjects."""
