r"""Cases of drawn shapes, of whose settings any three meet: kernels have paths for one query, grouped heads, and masks.

A row is a point :math:`(a, b, c)` of :math:`\mathbb{F}_7^3`. The level of axis :math:`x` is :math:`a + b x + c x^2`,
and the last axis has the level `c`. Three axes determine the point, so each three levels of three axes meet in one
row. A row that is too large loses samples, then queries, then heads.

The name of a case tells all of it, as ``shape-17x1025-h8on2-d64-causal-permuted`` does; a written name makes it.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from attention_conformance import strides
from attention_conformance.cases.case import Case, Draw, hard
from attention_conformance.cases.kernels import ARRAYS, AT, MASKS, attention, in_memory
from attention_conformance.problem import Problem

LEVELS = 7

KEYS = ((1, 7, 16, 31), (63, 64, 65), (127, 128, 129, 200), (255, 256, 257, 300), (511, 512, 513, 600),
        (1023, 1024, 1025, 1100),
        (2048, 4096, 2049, 3000, 8192, 4097, 2500, 65537))  # fmt: skip
QUERIES = ((1,), (2, 7, 16, 17), (63, 64, 65), (0,), (127, 128, 129), (255, 256, 257), (511, 513, 1025, 2048))
"""Classes of lengths, at whose edges kernels change their way; 0 stands for as many queries as keys."""

HEADS = ((1, 1), (2, 2), (3, 3), (8, 2), (4, 1), (9, 3), (10, 2))
WIDTHS = ((16,), (32,), (64,), (40, 72, 80, 112), (96,), (128,), (256, 160, 192))
RULES = (("plain",), ("causal",), ("chunk",), ("lengths",), MASKS, ("bias",), ("ragged",))
"""Rules; a chunk is causal from the last key, and ragged samples have lengths under causality."""

MEMORY = (
    ("",), ("permuted",), ("part",), ("expanded", "expandedquery", "expandedmask"), ("shared",),
    ("offset", "strided", "stridedvalue", "offsetmask"),
    ("interleaved", "padded", "transposedkey", "permutedquery", "permutedkey", "permutedvalue", "transposedmask",
     "transposedbias"),
)  # fmt: skip
"""How arrays lie: a word for the kind, and one for the array where it is one alone."""

BATCHES = ((1, False), (2, False), (3, False), (1, True), (2, True), (3, True), (5, False))
"""Samples, and whether the type has 16 bits."""

RELATIONS = ("", "gradient", "shuffled", "hidden", "parts", "again", "rewritten")

AXES: tuple[Any, ...] = (KEYS, QUERIES, HEADS, WIDTHS, RULES, MEMORY, BATCHES, RELATIONS)

OF_RELATIONS = {
    "": "",
    "gradient": "; its gradients",
    "shuffled": "; samples, heads and keys in another order give the same in that order",
    "hidden": "; large finite keys behind the others, hidden, change nothing",
    "parts": "; samples, heads or some of the queries alone give their part",
    "again": "; a later call changes neither the result nor the bits of an equal call",
    "rewritten": "; new numbers in the same memory are read",
}
"""What is asked of a shape besides one call, by the measure that has the name."""

OF_PROPERTIES: dict[str, dict[str, Any]] = {
    "causal": {"rule": "causal"}, "mask": {"rule": "mask"}, "combined rules": {"rule": "ragged"},
    "masked non-finite": {"relation": "hidden"}, "fully masked row": {"rule": "mask"}, "decode": {"rule": "lengths"},
    "memory layout": {"memory": "permuted"}, "repetition": {"relation": "again"}, "gradient": {"relation": "gradient"},
}  # fmt: skip
"""The setting of a shape that shows a property of a named case."""

MOST_SCORES, MOST_NUMBERS = 270_000, 1_100_000
"""Scores of a call, and numbers of its keys; of types of 16 bits a fifth, as some processors have no products."""

SCORE = 100.0
"""The score that is added to all where they are high: its exponential overflows."""


@dataclass(frozen=True)
class Shape:
    """Sizes and settings of a call; ``value_width`` 0 stands for the width, ``relation`` for what is asked besides."""

    queries: int
    keys: int
    batch: int = 2
    heads: int = 2
    groups: int = 2
    width: int = 32
    value_width: int = 0
    rule: str = "plain"
    memory: str = ""
    scale: str = ""
    scores: str = ""
    relation: str = ""

    @property
    def name(self) -> str:
        """The name of the case; what is as by default is left out, but for the rule."""
        values = f"e{self.value_width}" if self.value_width else ""
        sizes = {"b": self.batch != 2, "h": (self.heads, self.groups) != (2, 2), "d": self.width != 32 or values}
        texts = {"b": f"b{self.batch}", "h": f"h{self.heads}on{self.groups}", "d": f"d{self.width}{values}"}
        words = [texts[each] for each, is_shown in sizes.items() if is_shown]
        words += filter(None, (self.rule, self.memory, self.scale, self.scores, self.relation))
        return "-".join([f"shape-{self.queries}x{self.keys}", *words])

    def problem(self, draw: Draw) -> Problem:
        """Make the arrays: normally distributed, of one call."""
        sizes = {name: getattr(self, name) for name in ("heads", "groups", "batch", "value_width")}
        options: dict[str, Any] = {"gradient": self.relation == "gradient"} | ({"scale": 0.3} if self.scale else {})
        problem = attention(draw, self.queries, self.keys, self.width, self.rule, **sizes, **options)
        if self.scores:  # in a channel of their own
            high = SCORE / 8.0 / (0.3 if self.scale else self.width**-0.5)
            problem = problem.put("query", AT[..., 0], 8.0).put("key", AT[..., 0], draw.array(high))
        return _in_memory(problem, self.memory)

    @classmethod
    def published(cls, geometry: Mapping[str, int], broken: str) -> Shape | None:
        """The shape of a named case, with the setting of what it breaks; None where it is small, or large."""
        if not {"B", "H", "M", "N", "D"} <= {*geometry} or geometry["N"] < 16 or 0 in geometry.values():
            return None
        batch, heads, queries, keys, width = (geometry[each] for each in "BHMND")
        shape = cls(queries, keys, batch, heads, geometry.get("G", heads), width, **OF_PROPERTIES.get(broken, {}))
        return shape if _cost(shape) <= 4 else None

    def bound(self, dtype: str, kappa: float) -> float:
        """Bound the error: a product of 1,000 that becomes a score costs more, as sums of many terms do."""
        factor = 16 if self.scores and dtype == "float32" else 1
        terms = math.sqrt(max(self.keys, self.queries if self.relation == "gradient" else 0))
        return max(factor * hard(dtype, kappa), terms / 2 if dtype == "float32" else 0.0)

    @property
    def shows(self) -> str:
        """A sentence."""
        words = " ".join(filter(None, (self.rule, self.memory, self.scale, self.scores and "high scores")))
        return (
            f"{self.batch} × {self.heads} heads on {self.groups}, {self.queries} queries, {self.keys} keys, "
            f"D = {self.width}, {words}{OF_RELATIONS[self.relation]}."
        )


ALWAYS = (Shape(3, 17, 1, 258, 129, 16), Shape(7, 33, 2, 4, 2, 20), Shape(65, 130, 1, 2, 2, 77))
"""More heads than a byte counts, and widths that are no multiple of 8 or of 2, which kernels may refuse."""


def _in_memory(problem: Problem, word: str) -> Problem:
    """The problem with arrays that lie as a word of a name says: those that it ends with, or all that have the kind."""
    kind = next((each for each in strides.MEMORY if word.startswith(each)), "")
    if not kind:
        return problem
    names = ("key", "value") if kind in ("part", "expanded", "shared") else (*ARRAYS, "mask", "bias", "cotangent")
    return in_memory(problem, kind, *((word.removeprefix(kind),) if word != kind else names))


_NAME = re.compile(
    r"shape-(?P<queries>\d+)x(?P<keys>\d+)(?:-b(?P<batch>\d+))?(?:-h(?P<heads>\d+)on(?P<groups>\d+))?"
    r"(?:-d(?P<width>\d+)(?:e(?P<value_width>\d+))?)?"
    rf"(?:-(?P<rule>{'|'.join(itertools.chain(*RULES))}))?"
    rf"(?:-(?P<memory>{'|'.join(filter(None, itertools.chain(*MEMORY)))}))?"
    rf"(?:-(?P<scale>scaled))?(?:-(?P<scores>high))?(?:-(?P<relation>{'|'.join(RELATIONS[1:])}))?"
)


def shape_of(name: str) -> Shape | None:
    """The shape that a name tells; None where it is no such name.

    >>> shape_of("shape-1x1024-h8on2-d64-plain") == Shape(1, 1024, heads=8, groups=2, width=64)
    True
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    fields: dict[str, Any] = {
        field: int(value) if value.isdigit() else value for field, value in match.groupdict().items() if value
    }
    shape = Shape(**fields)
    return shape if min(shape.keys, shape.batch, shape.groups, shape.width) > 0 == shape.heads % shape.groups else None


@functools.cache
def case_of(shape: Shape) -> Case:
    """The case of a shape."""
    measure = {"": "ulp", "rewritten": "overwritten"}.get(shape.relation, shape.relation)
    line = 3 if shape.rule in ("causal", "chunk", "ragged") else 1 if shape.rule in (*MASKS, "lengths", "bias") else 10
    line = 10 if shape.relation else line
    return Case(shape.name, line, shape.shows, shape.problem, shape.bound, measure=measure, compiled=())


@functools.cache
def drawn(seed: int = 0) -> tuple[tuple[Shape, bool], ...]:
    """The shapes of a seed, and those at all seeds, each with whether it is asked in a type of 16 bits."""
    pairs = ((_fitting(shape, 0.2 if narrow else 1.0), narrow) for shape, narrow in _rows(seed))
    return (*pairs, *((shape, False) for shape in ALWAYS))


def _rows(seed: int) -> Iterator[tuple[Shape, bool]]:
    for number, (a, b, c) in enumerate(itertools.product(range(LEVELS), repeat=3)):
        levels = [*((a + b * x + c * x * x) % LEVELS for x in range(LEVELS)), c]
        turn = number // LEVELS + number + seed
        drawn_levels: list[Any] = [axis[level] for axis, level in zip(AXES, levels, strict=True)]
        keys, queries, heads, width, rule, memory, (samples, narrow), relation = drawn_levels
        rule, memory = _turned(rule, turn), _turned(memory, turn)
        queries, keys, width = _turned(queries, turn), _turned(keys, turn + turn // 5), _turned(width, turn)
        scale, scores = "scaled" * (turn % 5 == 1), "high" * (turn % 4 == 2)
        shape = Shape(queries, keys, samples, heads[0], heads[1], width, 0, rule, memory, scale, scores, relation)
        yield replace(shape, queries=shape.queries or shape.keys, value_width=max(0, turn % 9 - 6)), narrow


def _turned(values: tuple[Any, ...], turn: int) -> Any:
    return values[turn % len(values)]


def _fitting(shape: Shape, share: float) -> Shape:
    """A shape whose memory is no word alone, and that is small enough: with fewer samples, queries, and heads."""
    if shape.relation == "rewritten" and shape.memory.startswith(("expanded", "shared")):  # into which nobody writes
        shape = replace(shape, relation="again")
    needs_heads = shape.memory.startswith(("permuted", "shared", "interleaved"))
    if shape.memory.startswith("expanded"):
        shape = replace(shape, batch=max(shape.batch, 2))
    if needs_heads and shape.groups == 1:
        shape = replace(shape, heads=2 * shape.heads, groups=2)
    ratio, least = shape.heads // shape.groups, 2 if needs_heads else 1
    queries = {"queries": 64 + shape.keys % 2}
    heads = [{"heads": size * ratio, "groups": size} for size in (2, least)]
    samples = {"batch": 2 if shape.memory.startswith("expanded") else 1}
    is_square = shape.queries == shape.keys  # of which the lengths are kept for longer
    changes = [samples, *heads, {"queries": 511}, queries] if is_square else [{"batch": 2}, queries, *heads, samples]
    for change in (*changes, {"queries": 17}, {"width": 32}, {"queries": 1}):
        if _cost(shape) <= share * (4 if is_square else 1):
            break
        shape = replace(shape, **{name: min(getattr(shape, name), size) for name, size in change.items()})
    return replace(shape, value_width=(0, 2 * shape.width // 3, 3 * shape.width // 2)[shape.value_width])


def _cost(shape: Shape) -> float:
    """The scores, or the numbers of keys, as a part of the most that there may be."""
    scores, numbers = shape.heads * shape.queries / MOST_SCORES, shape.groups * shape.width / MOST_NUMBERS
    return shape.batch * shape.keys * max(scores, numbers)
