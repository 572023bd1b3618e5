"""Calls of attention as facts: what Hypothesis draws and shrinks, and what a finding prints.

Facts are numbers, words and rules. Arrays come from their seed, and those that rules name from their names as well.
"""

from __future__ import annotations

import functools
import importlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from attention_conformance.oracle.positions import allowed
from attention_conformance.problem import DTYPES, NumpyArray, Problem, Rule, Seed, rounded

NONFINITE = (math.nan, math.inf, -math.inf)
KINDS = ("contiguous", "permuted", "transposed", "every-second", "part", "offset")
"""How query, key and value may lie in memory."""

VALUES: dict[str, Callable[[np.random.Generator, tuple[int, ...], str], NumpyArray]] = {
    "normal": lambda rng, dims, name: rng.standard_normal(dims),
    "narrow": lambda rng, dims, name: rng.standard_normal(dims) * 0.25,
    "wide": lambda rng, dims, name: rng.standard_normal(dims) * 2,
    "zeros": lambda rng, dims, name: np.zeros(dims),
    "equal": lambda rng, dims, name: np.full(dims, rng.standard_normal()),
    "integers": lambda rng, dims, name: rng.integers(-3, 4, dims).astype(float),
    "steep": lambda rng, dims, name: rng.standard_normal(dims) * (1 if name == "value" else 8),
    "small": lambda rng, dims, name: rng.standard_normal(dims) * 2.0**-10,
    "large values": lambda rng, dims, name: rng.standard_normal(dims) * (2.0**9 if name == "value" else 1),
    "mixed": lambda rng, dims, name: rng.standard_normal(dims) * np.exp2(rng.integers(-6, 4, dims)),
    "spiked": lambda rng, dims, name: np.where(rng.random(dims) < 0.1, 30.0, 0.1) * rng.standard_normal(dims),
}
"""Distributions of query, key and value."""


@dataclass(frozen=True, repr=False)
class Drawn:
    """One call of attention.

    Attributes
    ----------
    queries, keys, width, value_width, leading, heads, groups
        Sizes: (..., H, M, D), (..., G, N, D), (..., G, N, E).
    values : str
        How large the numbers are, by the names of `VALUES`.
    shift : float
        It is added to a channel of the keys.
    mask, score_mod : Rule, optional
        The arrays that they name are made by `named_array`.
    bias, planted : str, optional
        The axes of a bias, such as "hmn", perhaps with some "-inf". The arrays whose unused vectors are not finite.
    sinks : float, optional
        Their mean.
    options, memory : mapping, tuple of pairs
        As in `Problem`.
    gradient : bool
        Whether there is a cotangent.
    """

    queries: int
    keys: int
    width: int
    value_width: int
    leading: tuple[int, ...] = ()
    heads: int = 1
    groups: int = 1
    dtype: str = "float32"
    seed: int = 0
    values: str = "normal"
    shift: float = 0.0
    mask: Rule | None = None
    bias: str | None = None
    score_mod: Rule | None = None
    sinks: float | None = None
    planted: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    memory: tuple[tuple[str, str], ...] = ()
    gradient: bool = False

    def __repr__(self) -> str:
        told = ((each, getattr(self, each.name)) for each in fields(self))
        of = [f"{each.name}={one!r}" for each, one in told if one not in (each.default, {})]
        return f"{type(self).__name__}({', '.join(of)})"

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(repr(self))

    def problem(self) -> Problem:
        """The arrays and options of the call."""
        rng, kv = np.random.default_rng(self.seed), (*self.leading, self.groups, self.keys)
        shapes = {"query": (*self.leading, self.heads, self.queries, self.width)}
        shapes |= {"key": (*kv, self.width), "value": (*kv, self.value_width)}
        found = {name: VALUES[self.values](rng, dims, name) for name, dims in shapes.items()}
        found["key"][..., :1] += self.shift
        if self.bias is not None:
            axes, _, infinite = self.bias.partition(" ")
            found["bias"] = rng.standard_normal(self._dims(axes)) * 2
            if infinite:
                found["bias"] = np.where(rng.random(self._dims(axes)) < 0.3, -np.inf, found["bias"])
        if self.sinks is not None:
            found["sinks"] = rng.standard_normal((self.heads,)) + self.sinks
        arrays = {name: rounded(each, self.dtype) for name, each in found.items()}
        for rule in (self.mask, self.score_mod):
            arrays |= {name: self.named_array(name) for name in _names(rule)}
        into = (*self.leading, self.heads, self.queries, self.value_width)
        cotangent = rounded(rng.standard_normal(into), self.dtype) if self.gradient else None
        problem = Problem(arrays, self.mask, self.options, cotangent, self.score_mod, memory=dict(self.memory))
        return problem if self.planted is None else self._with_nonfinite(problem)

    def named_array(self, name: str) -> NumpyArray:
        """The array of a rule by its kind, what it is drawn from, and a number that tells it from others.

        These are ``flags AXES DENSITY``, ``integers LOW HIGH``, ``ids SIDE BATCH ORDER``, ``period NUMBER``,
        ``table BUCKETS`` and ``factor``. Letters of axes are b for all leading ones, h, m and n.
        """
        kind, *told = name.split()
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        if kind == "flags":
            return rng.random(self._dims(told[0].strip("-"))) < float(told[1])
        if kind == "integers":
            return rng.integers(int(told[0]), int(told[1]) + 1, self.leading).astype(np.int32)
        if kind == "ids":
            length = self.queries if told[0] == "query" else self.keys
            ids = rng.integers(0, 3, (*(self.leading if told[1] == "batched" else ()), length)).astype(np.int32)
            return np.sort(ids, axis=-1) if told[2] == "sorted" else ids
        if kind == "period":
            return np.asarray(told[0], dtype=np.int32)
        shape = (int(told[0]), self.heads) if kind == "table" else ()
        return rounded(rng.standard_normal(shape), self.dtype)

    def _dims(self, axes: str) -> tuple[int, ...]:
        sizes = {"h": self.heads, "m": self.queries, "n": self.keys}
        dims = tuple(size if letter in axes else 1 for letter, size in sizes.items())
        return (*self.leading, *dims) if "b" in axes else dims

    def _with_nonfinite(self, problem: Problem) -> Problem:
        """Numbers that are not finite in what no query may attend to."""
        seen = allowed(problem) & (problem.arrays.get("bias", np.zeros(())).astype(float) != -np.inf)
        groups = (*self.leading, self.groups, self.heads // self.groups, self.queries, self.keys)
        used, rng = seen.reshape(groups).any(axis=(-3, -2))[..., None], np.random.default_rng(self.seed + 1)
        for name in str(self.planted).split():
            bad = rounded(rng.choice(NONFINITE, problem.arrays[name].shape), self.dtype)
            problem = problem.holding(**{name: np.where(used, problem.arrays[name], bad)})
        return problem


def _names(rule: Rule | None) -> Iterator[str]:
    """The arrays that a rule names."""
    for each in rule.arguments.values() if rule else ():
        if isinstance(each, Rule):
            yield from _names(each)
        elif isinstance(each, str):
            yield each


# Strategies


def problems(
    sizes: Any, offers: Sequence[str], *, dtypes: Sequence[str] = DTYPES, values: Sequence[str] = tuple(VALUES),
    scales: Sequence[float] = (1.0, 0.5, -0.3, 2.0, 0.0, 1 / 3),
) -> Any:  # fmt: skip
    """Calls of attention that are right, the simplest first, as a strategy of Hypothesis.

    Parameters
    ----------
    sizes : strategy
        Of dictionaries: the sizes of a `Drawn`.
    offers : sequence of str
        The fields of a `Drawn` that may be drawn, and the names of options.
    """
    st: Any = importlib.import_module("hypothesis.strategies")

    def drawn(draw: Any) -> Drawn:
        of = draw(sizes)
        told = {name: draw(each) for name, each in _facts(st, of["heads"], of["keys"]).items() if name in offers}
        scale = draw(st.none() | st.sampled_from(scales)) if "scale" in offers else None
        options = {"scale": scale} | {name: told.pop(name, None) for name in ("is_causal", "softcap", "dropout")}
        return Drawn(
            **of,
            **told,
            values=draw(st.sampled_from(values)),
            dtype=draw(st.sampled_from(dtypes)),
            seed=draw(st.integers(0, 2**16)),
            options={name: each for name, each in options.items() if each is not None and each is not False},
        )

    return st.composite(drawn)()


@functools.cache
def _facts(st: Any, heads: int, keys: int) -> dict[str, Any]:
    offset = st.integers(-4, 6)
    axes = st.sampled_from(["mn", "n", "hmn", "h", "bhmn", "bmn", "", "mn -inf", "n -inf", "bhmn -inf"])
    table, directions = st.sampled_from(["table 4", "table 8"]), st.booleans()
    changes = st.one_of(
        _rule(st, "alibi", num_heads=st.just(heads), offset=offset),
        _rule(
            st,
            "relative_bias",
            table=table,
            bidirectional=directions,
            max_distance=st.sampled_from([8, 20]),
            offset=offset,
        ),
        st.just(Rule("steepened", {"factor": "factor 0", "distance_factor": "factor 1"})),
    )
    memory = st.tuples(*(st.tuples(st.just(name), st.sampled_from(KINDS)) for name in ("query", "key", "value")))
    return {
        "shift": st.sampled_from((0.0, 8.0, -8.0)),
        "mask": st.none() | _masks(st, keys),
        "bias": st.none() | axes,
        "score_mod": st.none() | st.none() | changes,
        "sinks": st.none() | st.none() | st.sampled_from([0.0, -3.0, 5.0]),
        "planted": st.sampled_from([None, None, "key", "value", "key value"]),
        "memory": memory.map(lambda pairs: tuple(pair for pair in pairs if pair[1] != KINDS[0])),
        "gradient": st.booleans(),
        "is_causal": st.sampled_from([False, False, True]),
        "softcap": st.none() | st.sampled_from([1.0, 5.0, 30.0]),
        "dropout": st.none() | st.builds(Seed, st.sampled_from([0.1, 0.5, 0.9]), st.integers(0, 2**64 - 1)),
    }


def _rule(st: Any, kind: str, **arguments: Any) -> Any:
    drawn = st.tuples(*arguments.values())  # a call takes them in this order
    return drawn.map(lambda each: Rule(kind, dict(zip(arguments, each, strict=True))))


def _masks(st: Any, keys: int) -> Any:
    """Rules and trees of them; the first part of a combination is no array, which has operators of its own."""
    number, reach = st.integers(0, 2), st.none() | st.integers(0, 5)

    def per_entry(low: int, high: int) -> Any:
        return st.integers(low, high) | number.map(lambda each: f"integers {low} {high} {each}")

    def segments(batch: str, order: str, each: int) -> Rule:
        return Rule("Segments", {f"{of}_ids": f"ids {of} {batch} {order} {each}" for of in ("query", "key")})

    axes = st.sampled_from(["mn", "n", "m", "hmn", "hn", "bhmn", "bn", "bmn", "bm", "-"])
    flags = st.tuples(axes, st.sampled_from([0.0, 0.3, 0.7, 1.0]), number)
    structured = st.one_of(
        _rule(st, "Causal", offset=per_entry(-3, 5)),
        _rule(st, "SlidingWindow", left=reach, right=reach, offset=per_entry(-3, 5)),
        _rule(st, "KeyLengths", lengths=per_entry(0, keys + 4)),
        st.builds(segments, st.sampled_from(["shared", "batched"]), st.sampled_from(["any", "sorted"]), number),
        _rule(st, "periodic", period=st.integers(1, 4).map("period {}".format)),
    )
    arrays = flags.map(lambda told: Rule("array", {"name": "flags {} {} {}".format(*told)}))
    combined = st.recursive(
        structured,
        lambda inner: st.one_of(
            inner.map(Rule.__invert__),
            st.builds(Rule.__and__, inner, inner | structured | arrays),
            st.builds(Rule.__or__, inner, inner | structured | arrays),
        ),
        max_leaves=4,
    )
    return structured | arrays | combined
