"""Problems of attention as they are drawn, in blocks of the core, and what their errors may be.

A drawn call is facts: numbers, words and rules, which Hypothesis shrinks, and which a failure prints. Arrays come from
their seed, and those that rules name from their names as well.
"""

from __future__ import annotations

import functools
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

import attention_core as ac
from attention_conformance.call import output_function
from attention_conformance.oracle.attention import Truth
from attention_conformance.oracle.positions import allowed
from attention_conformance.problem import DTYPES, NumpyArray, Problem, Rule, Seed, rounded
from attention_core._attention.blocks import plan as block_plan

EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52}
TINY = {"float32": 2.0**-126, "float64": 2.0**-1022}
NONFINITE = (math.nan, math.inf, -math.inf)
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
    mask, score_mod : Rule, optional
        The arrays that they name are made by `named_array`.
    bias, planted : str, optional
        The axes of a bias, such as "hmn", perhaps with some "-inf". The arrays whose unused vectors are not finite.
    sinks : float, optional
        Their mean.
    options : mapping
        As in `Problem`.
    gradient : bool
        Whether there is a cotangent.
    blocks : tuple of int, optional
        How many there are of queries, of keys, and of keys in the backward pass.
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
    mask: Rule | None = None
    bias: str | None = None
    score_mod: Rule | None = None
    sinks: float | None = None
    planted: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    gradient: bool = False
    blocks: tuple[int, int, int] | None = None

    def __repr__(self) -> str:
        told = ((each, getattr(self, each.name)) for each in fields(self))
        of = [f"{each.name}={one!r}" for each, one in told if one not in (each.default, {})]
        return f"{type(self).__name__}({', '.join(of)})"

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(repr(self))

    @property
    def is_exact(self) -> bool:
        return self.options.get("arithmetic") == "reproducible"

    @property
    def wide(self) -> str:
        """The type that the call is computed in."""
        return "float64" if self.dtype == "float64" else "float32"

    def told(self, **options: Any) -> Drawn:
        """The same with other options; None leaves one out."""
        return replace(
            self, options={name: each for name, each in (self.options | options).items() if each is not None}
        )

    def problem(self) -> Problem:
        """The arrays and options of the call."""
        rng, kv = np.random.default_rng(self.seed), (*self.leading, self.groups, self.keys)
        shapes = {"query": (*self.leading, self.heads, self.queries, self.width)}
        shapes |= {"key": (*kv, self.width), "value": (*kv, self.value_width)}
        found = {name: VALUES[self.values](rng, dims, name) for name, dims in shapes.items()}
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
        problem = Problem(arrays, self.mask, self.options, cotangent, self.score_mod)
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


def differentiating() -> list[Any]:
    """The backends asked for whose library differentiates, PyTorch first."""
    asked = [
        name for name in os.environ.get("ATTENTION_CORE_BACKENDS", "").split(",") if name
    ] or ac.backend.available_backends()
    return [ac.backend.get_backend(name) for name in ("torch", "jax", "tensorflow") if name in asked]


def called(drawn: Drawn, problem: Problem, backend: Any) -> dict[str, np.ndarray]:
    """What a call returns: the output, logsumexp, and weights where they are asked for."""
    asked = problem.changed(options=problem.options | {"return_logsumexp": True})
    with forced_blocks(drawn, backend):
        found = output_function(ac.scaled_dot_product_attention, asked)(backend.from_numpy(dict(problem.arrays)))
    return {name: backend.to_numpy(each) for name, each in found.items()}


def gradients(
    drawn: Drawn, problem: Problem, backend: Any, compiled: Callable[..., Any] = lambda function: function
) -> dict[str, np.ndarray]:
    """Of the sum of output times cotangent; all multiply and round alike, and only that sum differs."""
    xp, names = backend.namespace, problem.variables
    arrays = backend.from_numpy(dict(problem.arrays))
    factor, wide = backend.from_numpy(problem.cotangent.astype(drawn.wide)), getattr(xp, drawn.wide)

    def loss(*variables: Any) -> Any:
        replaced = arrays | dict(zip(names, variables, strict=True))
        output = output_function(ac.scaled_dot_product_attention, problem)(replaced)["output"]
        return xp.sum(xp.multiply(xp.astype(output, wide), factor))

    with forced_blocks(drawn, backend):
        everything = compiled(lambda *variables: backend.value_and_grad(loss)(*variables)[1])
        found = everything(*(arrays[name] for name in names))
    return dict(zip(names, map(backend.to_numpy, found), strict=True))


@contextmanager
def forced_blocks(drawn: Drawn, backend: Any) -> Iterator[None]:
    """Let there be as many blocks as the problem says, in both arithmetics."""
    if drawn.blocks is None:
        yield
        return
    lengths = drawn.queries, drawn.keys, drawn.keys
    queries, keys, backward = (max(1, -(-length // count)) for length, count in zip(lengths, drawn.blocks, strict=True))
    tuning, sizes = backend.tuning, block_plan._reproducible_block_sizes
    small = {"dense_below": 0, "structured_below": 0, "backward_keys": backward, "exact_scores": queries * keys}
    backend.tuning = tuning._replace(queries=1, keys=keys, min_queries=queries, **small)
    block_plan._reproducible_block_sizes = lambda *_: (queries, keys)
    try:
        yield
    finally:
        backend.tuning, block_plan._reproducible_block_sizes = tuning, sizes


def relative_bound(drawn: Drawn, truth: Truth) -> np.ndarray:
    """By how much a row of weights may be off, relative: derived from the sums that are rounded.

    A score is a sum of D products, rounded D + 5 times at the magnitude κ; a total is one of N + 1 exponentials.
    """
    roundings = (drawn.width + 6) * kappas(truth) + drawn.keys + 12
    return np.expm1(np.minimum(EPSILON[drawn.wide] * roundings, 300.0))


def kappas(truth: Truth) -> np.ndarray:
    """The magnitude of the scores of each row."""
    return truth.arrays["logsumexp"].scale - 1


# Strategies

NAMES = ("leading", "heads", "groups", "queries", "keys", "width", "value_width")
SHAPES = {  # of libraries that compile for every shape: few of them
    "few": [((), 2, 1, 3, 5, 4, 3), ((2,), 4, 2, 5, 7, 3, 3), ((2,), 2, 2, 1, 9, 2, 5)],
}
OFFERS = ("mask", "is_causal", "bias", "scale", "softcap", "dropout", "planted")


@st.composite
def sizes(draw: Any, pool: str | None) -> dict[str, Any]:
    """The sizes of a problem: any, or out of few."""
    if pool is not None:
        return dict(zip(NAMES, draw(st.sampled_from(SHAPES[pool])), strict=True))
    groups, times = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3]))
    leading = draw(st.sampled_from([(), (), (1,), (2,), (2,), (3, 1), (0,), (2, 3)]))
    few = np.prod(leading) * groups * times <= 6  # as the oracle takes seconds for more
    long = st.integers(0, 9) | st.integers(1, 9) | st.sampled_from([17, 33] if few else [7, 9])
    drawn = leading, groups * times, groups, draw(long), draw(long), draw(st.integers(1, 8)), draw(st.integers(0, 8))
    return dict(zip(NAMES, drawn, strict=True))


@st.composite
def problems(
    draw: Any, *, pool: str | None = None, dtypes: tuple[str, ...] = DTYPES, arithmetics: tuple[str, ...] = ("fast",)
) -> Drawn:
    """Calls of attention that are right, in all ways of computing them, the simplest first."""
    arithmetic = draw(st.sampled_from(arithmetics))
    implementation = draw(st.sampled_from(("auto", "dense", "blockwise")))
    offers = OFFERS if arithmetic == "reproducible" else (*OFFERS, "score_mod", "sinks")
    of = draw(sizes(pool))
    facts = {name: draw(each) for name, each in _facts(of["heads"], of["keys"]).items() if name in offers}
    options = {name: facts.pop(name) for name in ("scale", "is_causal", "softcap", "dropout")}
    values = draw(st.sampled_from(list(VALUES)))
    dtype = draw(st.sampled_from([each for each in dtypes if (arithmetic, each) != ("reproducible", "float64")]))
    drawn = Drawn(**of, **facts, values=values, dtype=dtype, seed=draw(st.integers(0, 2**16)))
    weights = implementation != "blockwise" and draw(st.booleans())
    blocks = draw(st.none() | st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)))
    options = {name: each for name, each in options.items() if each is not None and each is not False}
    options |= {"implementation": implementation, "arithmetic": arithmetic, "return_weights": weights or None}
    return replace(drawn, blocks=blocks).told(**options)


@functools.cache
def _facts(heads: int, keys: int) -> dict[str, Any]:
    offset = st.integers(-4, 6)
    axes = st.sampled_from(["mn", "n", "hmn", "h", "bhmn", "bmn", "", "mn -inf", "n -inf", "bhmn -inf"])
    table, directions = st.sampled_from(["table 4", "table 8"]), st.booleans()
    changes = st.one_of(
        _rule("alibi", num_heads=st.just(heads), offset=offset),
        _rule(
            "relative_bias", table=table, bidirectional=directions, max_distance=st.sampled_from([8, 20]), offset=offset
        ),
        st.just(Rule("steepened", {"factor": "factor 0", "distance_factor": "factor 1"})),
    )
    return {
        "mask": st.none() | _masks(keys),
        "bias": st.none() | axes,
        "score_mod": st.none() | st.none() | changes,
        "sinks": st.none() | st.none() | st.sampled_from([0.0, -3.0, 5.0]),
        "planted": st.sampled_from([None, None, "key", "value", "key value"]),
        "is_causal": st.sampled_from([False, False, True]),
        "scale": st.none() | st.sampled_from([1.0, 0.5, -0.3, 2.0, 0.0, 1 / 3]),
        "softcap": st.none() | st.sampled_from([1.0, 5.0, 30.0]),
        "dropout": st.none() | st.builds(Seed, st.sampled_from([0.1, 0.5, 0.9]), st.integers(0, 2**64 - 1)),
    }


def _rule(kind: str, **arguments: Any) -> Any:
    drawn = st.tuples(*arguments.values())  # a call takes them in this order
    return drawn.map(lambda each: Rule(kind, dict(zip(arguments, each, strict=True))))


def _masks(keys: int) -> Any:
    """Rules and trees of them; the first part of a combination is no array, which has operators of its own."""
    number, reach = st.integers(0, 2), st.none() | st.integers(0, 5)

    def per_entry(low: int, high: int) -> Any:
        return st.integers(low, high) | number.map(lambda each: f"integers {low} {high} {each}")

    def segments(batch: str, order: str, each: int) -> Rule:
        return Rule("Segments", {f"{of}_ids": f"ids {of} {batch} {order} {each}" for of in ("query", "key")})

    axes = st.sampled_from(["mn", "n", "m", "hmn", "hn", "bhmn", "bn", "bmn", "bm", "-"])
    flags = st.tuples(axes, st.sampled_from([0.0, 0.3, 0.7, 1.0]), number)
    structured = st.one_of(
        _rule("Causal", offset=per_entry(-3, 5)),
        _rule("SlidingWindow", left=reach, right=reach, offset=per_entry(-3, 5)),
        _rule("KeyLengths", lengths=per_entry(0, keys + 4)),
        st.builds(segments, st.sampled_from(["shared", "batched"]), st.sampled_from(["any", "sorted"]), number),
        _rule("periodic", period=st.integers(1, 4).map("period {}".format)),
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


def pool_of(backend: Any) -> str | None:
    """Few shapes where every one is compiled."""
    return "few" if backend.name in ("jax", "tensorflow") else None


def dtypes_of(backend: Any) -> tuple[str, ...]:
    return tuple(name for name in DTYPES if name in backend.dtypes)


def differentiable(drawn: Drawn) -> Drawn:
    """Infinite biases are left to the forward pass, and the results that are not differentiated as well."""
    bias = drawn.bias and drawn.bias.partition(" ")[0]
    return replace(drawn.told(return_weights=None), gradient=True, bias=bias)
