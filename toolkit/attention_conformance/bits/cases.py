"""Questions about bits: calls that give the same by mathematics, and owe each other bits only where that is promised.

Each is a whole call, and variations of it: other calls, whose results are parts of those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attention_conformance.cases.batch import CALLS
from attention_conformance.cases.case import BITWISE, Case, Draw, hard
from attention_conformance.cases.kernels import attention
from attention_conformance.problem import NumpyArray, Problem, Rule
from attention_conformance.strides import EQUAL, MEMORY

LENGTH, WIDTH, SAMPLES = 130, 32, 6
"""More than two blocks of 64, and a scale that is no power of 2; as many samples as `CALLS` has."""

CHUNKS = (1, 7, 16, 64, 100)
STEPS = (0, 1, 16, 63, 64, 100, 129)
"""Queries that are decoded alone."""

PADDED, PADDING = 97, (98, 128, 160)
THREADS = (1, 2, 4)
PIECES = ((64, 130), (0, 1), (1, 64))
ALL = slice(None)
AXES = {
    "output": ("batch", "heads", "rows"),
    "logsumexp": ("batch", "heads", "rows"),
    "query": ("batch", "heads", "rows"),
    "key": ("batch", "kv_heads", "keys"),
    "value": ("batch", "kv_heads", "keys"),
}
"""The axes of each result; those named as an argument are its gradients."""


@dataclass(frozen=True)
class Variation:
    """Another call, and which part of the whole its results are.

    Attributes
    ----------
    taken : mapping
        The indices along the axes of `AXES`; None where the results have no such part of the whole.
    keys : int, optional
        How many keys of its own belong to the whole.
    how : str
        How it is called: a mode of the library; ``recorded``, while gradients are recorded; ``merged``, from pieces.
    before : tuple of Problem
        What is called first.
    """

    says: str
    problem: Problem
    taken: Mapping[str, Any] = field(default_factory=dict)
    keys: int | None = None
    how: str = ""
    threads: int = 0
    before: tuple[Problem, ...] = ()

    def part(self, name: str, whole: NumpyArray) -> NumpyArray | None:
        """The part of a result of the whole."""
        for axis, kind in enumerate(AXES.get(name, ())):
            index = self.taken.get(kind, ALL)
            if index is None:
                return None
            whole = whole[(ALL,) * axis + (index,)]
        return whole

    def own(self, name: str, array: NumpyArray) -> NumpyArray:
        """The part of its own result that is compared."""
        return array[..., : self.keys, :] if name in ("key", "value") else array


def _part(problem: Problem, says: str, **taken: Any) -> Variation:
    """A call with parts of the arrays."""

    def part(name: str, each: NumpyArray) -> NumpyArray:
        kinds = ("batch", "heads", "rows", "keys") if name == "mask" else AXES[name]
        for axis, kind in enumerate(kinds):
            if each.shape[axis] > 1:
                each = each[(ALL,) * axis + (taken.get(kind, ALL),)]
        return each

    arrays = {name: np.ascontiguousarray(part(name, each)) for name, each in problem.arrays.items()}
    cotangent = None if problem.cotangent is None else part("output", problem.cotangent)
    return Variation(says, problem.changed(arrays=arrays, cotangent=cotangent), taken)


def _same(problem: Problem) -> Iterator[Variation]:
    yield Variation("the same call", problem)


def _again(problem: Problem) -> Iterator[Variation]:
    shorter = {name: each[:, :, : LENGTH - 29] for name, each in problem.arrays.items()}
    before = {"second call": problem, "call after another shape": problem.changed(arrays=shorter, cotangent=None)}
    before["call after other numbers"] = problem.turned().changed(cotangent=None)
    yield from (Variation(f"a {says}", problem, before=(each,)) for says, each in before.items())


def _batches(problem: Problem) -> Iterator[Variation]:
    for samples in CALLS:
        where = "alone" if len(samples) == 1 else f"in a batch of {len(samples)}"
        yield _part(problem, f"samples {', '.join(map(str, samples))} {where}", batch=list(samples))


def _shards(problem: Problem) -> Iterator[Variation]:
    heads, kv_heads = (problem.arrays[name].shape[1] for name in ("query", "key"))
    group = heads // kv_heads
    for count in dict.fromkeys((kv_heads // 2, 1)):
        for at in range(0, kv_heads, count):
            taken = slice(group * at, group * (at + count))
            says = f"heads {taken.start} to {taken.stop - 1} alone"
            yield _part(problem, says, heads=taken, kv_heads=slice(at, at + count))


def _chunk(problem: Problem, start: int, stop: int) -> Variation:
    """Queries of a causal call with the keys up to the last of them."""
    variation = _part(problem, f"queries {start} to {stop - 1}", rows=slice(start, stop), keys=slice(0, stop))
    rule = Rule("Causal", {"offset": start})
    asked = replace(variation.problem, mask=rule if stop - start > 1 else None, options={})
    return replace(variation, problem=asked)


def _chunks(problem: Problem) -> Iterator[Variation]:
    drawn = int(np.frombuffer(problem.arrays["query"].tobytes(), np.uint8)[:8].sum()) % 60 + 2
    for size in (*CHUNKS, drawn):
        for start in sorted({0, LENGTH // 2 // size * size, (LENGTH - 1) // size * size}):
            yield _chunk(problem, start, min(start + size, LENGTH))


def _padded(problem: Problem) -> Iterator[Variation]:
    for length in PADDING:
        arrays = {"mask": np.broadcast_to(np.arange(length) < PADDED, (SAMPLES, 1, LENGTH, length)).copy()}
        for name in ("key", "value"):
            arrays[name] = np.concatenate([each := problem.arrays[name], each[:, :, : length - PADDED]], axis=2)
        padded = problem.holding(**arrays)
        yield Variation(f"{length - PADDED} masked keys more", padded, keys=PADDED)


def _strides(problem: Problem) -> Iterator[Variation]:
    for kind in MEMORY:
        if kind not in ("contiguous", *EQUAL):
            memory = dict.fromkeys(("query", "key", "value", "cotangent"), kind)
            yield Variation(f"arrays that lie {kind}", replace(problem, memory=memory))


def _draw(rule: str = "plain", *, keys: int = LENGTH, groups: int = 4, gradient: bool = True, tiny: bool = False,
          **options: Any) -> Callable[[Draw], Problem]:  # fmt: skip
    def inputs(draw: Draw) -> Problem:
        sizes: dict[str, Any] = {"heads": 4, "groups": groups, "batch": SAMPLES, "gradient": gradient}
        problem = attention(draw, LENGTH, keys, WIDTH, rule, **sizes, **options)
        if tiny:
            factor = problem.arrays["value"].dtype.type(2.0**-11 if draw.dtype == "float16" else 2.0**-122)
            problem = problem.holding(value=problem.arrays["value"] * factor)
        return problem

    return inputs


_ROWS: tuple[tuple[str, str, Callable[[Draw], Problem], Callable[[Problem], Iterable[Variation]]], ...] = (
    ("whole", "A whole call.", _draw(), _same),
    ("causal", "A causal call.", _draw("causal"), _same),
    ("mask", "A call with a mask.", _draw("mask"), _same),
    ("grouped", "A call with two query heads for each KV head.", _draw(groups=2), _same),
    ("scale", "A call with a scale of the caller.", _draw(scale=0.3, gradient=False), _same),
    ("subnormal", "Values among the subnormal numbers.", _draw(gradient=False, tiny=True), _same),
    ("logsumexp", "A call that asks for the logsumexp.", _draw(gradient=False, return_logsumexp=True), _same),
    ("again", "Equal calls, also after another shape.", _draw(), _again),
    ("batch", "A batch element alone, and at each place among others.", _draw(), _batches),
    ("heads", "Heads in shards.", _draw(), _shards),
    ("grouped-heads", "Groups of heads in shards.", _draw(groups=2), _shards),
    ("chunks", "A causal prompt in chunks.", _draw("causal", gradient=False), _chunks),
    ("decode", "A query alone with the keys up to its own.", _draw("causal", gradient=False),
     lambda p: (_chunk(p, step, step + 1) for step in STEPS)),
    ("pieces", "KV chunks, merged by their logsumexp.", _draw(gradient=False),
     lambda p: [Variation("three KV chunks", replace(p, pieces=PIECES), how="merged")]),
    ("padding", "Keys cut, or followed by masked ones.", _draw(keys=PADDED), _padded),
    ("strides", "Other strides.", _draw(), _strides),
    ("training", "Gradients recorded, without dropout.", _draw(gradient=False),
     lambda p: [Variation("the forward pass of training", p, how="recorded")]),
    ("threads", "One thread and several.", _draw(),
     lambda p: (Variation(f"{count} thread{'s' * (count > 1)}", p, threads=count) for count in THREADS)),
    ("compiled", "Eager and compiled.", _draw(gradient=False),
     lambda p: (Variation(f"mode {mode}", p, how=mode) for mode in ("eager", "compiled", "graph", "jit", "xla"))),
)  # fmt: skip

BITS = tuple(Case(f"bits-{name}", 0, shows, inputs, measure=BITWISE, bound=hard) for name, shows, inputs, _ in _ROWS)
"""The questions, the first answers first."""

VARIATIONS = {f"bits-{name}": variations for name, *_, variations in _ROWS}
"""From the problem of a case to its variations."""

SAME_CALL = tuple(name for name, variations in VARIATIONS.items() if variations is _same)
"""Questions about two attentions alone: the call is the same."""
