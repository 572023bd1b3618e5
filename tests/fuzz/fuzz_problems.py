"""Problems of attention as plain facts: what Hypothesis draws, what it shrinks, and what a finding prints.

A `Problem` holds numbers and words only. Its arrays come from its seed. Masks and score modifications are
trees of tuples. The oracle reads them by its own rules, and `Built` turns them into those of the core.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import attention_core as ac
from attention_core._attention.blocks import plan as block_plan

DTYPES = ("float32", "float64", "float16", "bfloat16")
NONFINITE = (math.nan, math.inf, -math.inf)

Tree = tuple[Any, ...] | None


@dataclass(frozen=True, repr=False)
class Problem:
    """One call of attention.

    Attributes
    ----------
    leading, heads, groups, rows, columns, width, value_width
        Sizes: (..., H, M, D), (..., G, N, D), (..., G, N, E).
    dtype : str
    seed : int
        Of all arrays.
    values : str
        How large the numbers are, by the names of `MAGNITUDES`.
    mask, score_mod : tuple or None
        Trees: the name of a rule, and its numbers.
    bias, planted : str or None
        The shape of a bias by its axes, such as "hmn"; where non-finite numbers are put.
    blocks : tuple of int or None
        How many blocks there are: of queries, of keys, and of keys in the backward pass.
    """

    leading: tuple[int, ...] = ()
    heads: int = 1
    groups: int = 1
    rows: int = 1
    columns: int = 1
    width: int = 1
    value_width: int = 1
    dtype: str = "float32"
    seed: int = 0
    values: str = "normal"
    mask: Tree = None
    is_causal: bool = False
    bias: str | None = None
    scale: float | None = None
    softcap: float | None = None
    score_mod: Tree = None
    sinks: float | None = None
    dropout: tuple[float, int] | None = None
    planted: str | None = None
    implementation: str = "auto"
    arithmetic: str = "fast"
    blocks: tuple[int, int, int] | None = None
    weights: bool = False
    logsumexp: bool = False

    def __repr__(self) -> str:
        changed = (each.name for each in fields(self) if getattr(self, each.name) != each.default)
        return f"Problem({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(repr(self))

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """(..., H, M, N)."""
        return (*self.leading, self.heads, self.rows, self.columns)


def differentiating() -> list[Any]:
    """The backends asked for whose library differentiates, PyTorch first."""
    asked = [
        name for name in os.environ.get("ATTENTION_CORE_BACKENDS", "").split(",") if name
    ] or ac.backend.available_backends()
    return [ac.backend.get_backend(name) for name in ("torch", "jax", "tensorflow") if name in asked]


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def wide_name(dtype: str) -> str:
    """The type that a call is computed in."""
    return "float64" if dtype == "float64" else "float32"


MAGNITUDES: dict[str, Callable[[np.random.Generator, tuple[int, ...], str], np.ndarray]] = {
    "normal": lambda rng, dims, name: rng.standard_normal(dims),
    "zeros": lambda rng, dims, name: np.zeros(dims),
    "equal": lambda rng, dims, name: np.full(dims, rng.standard_normal()),
    "integers": lambda rng, dims, name: rng.integers(-3, 4, dims).astype(float),
    "steep": lambda rng, dims, name: rng.standard_normal(dims) * (1 if name == "value" else 8),
    "small": lambda rng, dims, name: rng.standard_normal(dims) * 2.0**-10,
    "large values": lambda rng, dims, name: rng.standard_normal(dims) * (2.0**9 if name == "value" else 1),
    "mixed": lambda rng, dims, name: rng.standard_normal(dims) * np.exp2(rng.integers(-6, 4, dims)),
    "spiked": lambda rng, dims, name: np.where(rng.random(dims) < 0.1, 30.0, 0.1) * rng.standard_normal(dims),
}


def arrays_of(problem: Problem) -> dict[str, np.ndarray]:
    """Query, key, value, and what else the call needs, rounded to their dtypes."""
    p, rng = problem, np.random.default_rng(problem.seed)
    shapes = {
        "query": (*p.leading, p.heads, p.rows, p.width),
        "key": (*p.leading, p.groups, p.columns, p.width),
        "value": (*p.leading, p.groups, p.columns, p.value_width),
    }
    arrays = {name: MAGNITUDES[p.values](rng, dims, name) for name, dims in shapes.items()}
    if p.bias is not None:
        dims = bias_shape(p)
        arrays["bias"] = rng.standard_normal(dims) * 2
        if "-inf" in p.bias:
            arrays["bias"] = np.where(rng.random(dims) < 0.3, -np.inf, arrays["bias"])
    if p.sinks is not None:
        arrays["sinks"] = rng.standard_normal((p.heads,)) + p.sinks
    if p.score_mod is not None and p.score_mod[0] == "relative":
        arrays["table"] = rng.standard_normal((p.score_mod[1], p.heads))
    if p.score_mod is not None and p.score_mod[0] == "weighted":
        arrays["weight"] = rng.standard_normal(())
    return {name: array.astype(numpy_dtype(p.dtype)) for name, array in arrays.items()}


def bias_shape(problem: Problem) -> tuple[int, ...]:
    """Of the axes that a bias names; "b" stands for all leading ones."""
    p, axes = problem, problem.bias.partition(" ")[0]
    dims = tuple(size if letter in axes else 1 for letter, size in zip("hmn", p.scores_shape[-3:], strict=True))
    return (*p.leading, *dims) if "b" in axes else dims


def planted(problem: Problem, arrays: dict[str, np.ndarray], allowed: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays, with numbers that are not finite in what no query may attend to."""
    if problem.planted is None:
        return arrays
    p, rng = problem, np.random.default_rng(problem.seed + 1)
    group = p.heads // p.groups
    used = allowed.reshape(*p.leading, p.groups, group, p.rows, p.columns).any(axis=(-3, -2))
    found = dict(arrays)
    for name in ("key", "value"):
        if name in p.planted:
            bad = rng.choice(NONFINITE, arrays[name].shape).astype(arrays[name].dtype)
            found[name] = np.where(used[..., None], arrays[name], bad)
    return found


# Masks and score modifications of the core


class Built:
    """The arguments of the core for a problem, on one backend."""

    def __init__(self, problem: Problem, put: Callable[[Any], Any], arrays: dict[str, np.ndarray]) -> None:
        self.problem, self.put = problem, put
        self.arrays = {name: put(array) for name, array in arrays.items()}

    @property
    def qkv(self) -> list[Any]:
        return [self.arrays[name] for name in ("query", "key", "value")]

    def options(self, arrays: dict[str, Any] | None = None) -> dict[str, Any]:
        """All options of the call that are not defaults."""
        p, arrays = self.problem, self.arrays if arrays is None else arrays
        options: dict[str, Any] = {
            "mask": None if p.mask is None else mask_of(p, p.mask, self.put),
            "bias": arrays.get("bias"),
            "sinks": arrays.get("sinks"),
            "score_mod": None if p.score_mod is None else self._score_mod(arrays),
            "dropout": None if p.dropout is None else ac.Dropout(*p.dropout),
            "scale": p.scale,
            "softcap": p.softcap,
        }
        flags = {"is_causal": p.is_causal, "return_weights": p.weights, "return_logsumexp": p.logsumexp}
        words = {"implementation": p.implementation, "arithmetic": p.arithmetic}
        return {name: value for name, value in options.items() if value is not None} | flags | words

    def _score_mod(self, arrays: dict[str, Any]) -> Any:
        kind, *numbers = self.problem.score_mod
        if kind == "alibi":
            return ac.scores.alibi(self.problem.heads, offset=numbers[0])
        if kind == "relative":
            _, bidirectional, distance, offset = numbers
            return ac.scores.relative_bias(
                arrays["table"], bidirectional=bidirectional, max_distance=distance, offset=offset
            )
        return ac.scores.ScoreMod(weighted, (arrays["weight"],))


def weighted(scores: Any, batch: Any, head: Any, query: Any, key: Any, weight: Any) -> Any:
    """Scores times a number for odd keys, in the type of the scores."""
    xp = ac.backend.array_namespace(scores)
    odd = xp.astype(xp.remainder(xp.add(key, head), 2), scores.dtype)
    return xp.add(scores, xp.multiply(odd, xp.astype(weight, scores.dtype)))


def batch_numbers(problem: Problem, seed: int, low: int, high: int) -> np.ndarray:
    """An integer for each sample."""
    return np.random.default_rng(seed).integers(low, high + 1, problem.leading).astype(np.int32)


def boolean_array(problem: Problem, axes: str, seed: int, density: float) -> np.ndarray:
    named = dict(zip("hmn", problem.scores_shape[-3:], strict=True))
    dims = tuple(size if letter in axes else 1 for letter, size in named.items())
    dims = (*problem.leading, *dims) if "b" in axes else dims
    return np.random.default_rng(seed).random(dims) < density


def segment_ids(problem: Problem, seed: int, batched: bool) -> tuple[np.ndarray, np.ndarray]:
    rng, leading = np.random.default_rng(seed), problem.leading if batched else ()
    ids = [rng.integers(0, 3, (*leading, length)) for length in (problem.rows, problem.columns)]
    return tuple((np.sort(each, axis=-1) if seed % 2 else each).astype(np.int32) for each in ids)


def periodic(period: int, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (batch + head + query + key) % period != 0


def mask_of(problem: Problem, tree: tuple[Any, ...], put: Callable[[Any], Any]) -> Any:
    """The mask of the core for a tree."""
    kind, *rest = tree
    below = functools.partial(mask_of, problem, put=put)
    if kind == "causal":
        return ac.Causal(offset=_number(problem, rest[0], put))
    if kind == "window":
        return ac.SlidingWindow(rest[0], rest[1], offset=_number(problem, rest[2], put))
    if kind == "lengths":
        return ac.KeyLengths(_number(problem, rest[0], put))
    if kind == "segments":
        return ac.Segments(*map(put, segment_ids(problem, *rest)))
    if kind == "function":
        return ac.MaskFunction(functools.partial(periodic, rest[0]))
    if kind == "array":
        return put(boolean_array(problem, *rest))
    if kind == "not":
        return ~below(rest[0])
    return below(rest[0]) & below(rest[1]) if kind == "and" else below(rest[0]) | below(rest[1])


def _number(problem: Problem, number: Any, put: Callable[[Any], Any]) -> Any:
    return put(batch_numbers(problem, *number)) if isinstance(number, tuple) else number


@contextmanager
def forced_blocks(problem: Problem, backend: Any) -> Iterator[None]:
    """Let there be as many blocks as the problem says, in both arithmetics."""
    if problem.blocks is None:
        yield
        return
    lengths = problem.rows, problem.columns, problem.columns
    queries, keys, backward = (
        max(1, -(-length // count)) for length, count in zip(lengths, problem.blocks, strict=True)
    )
    tuning, sizes = backend.tuning, block_plan._reproducible_block_sizes
    small = {"dense_below": 0, "structured_below": 0, "backward_keys": backward, "exact_scores": queries * keys}
    backend.tuning = tuning._replace(queries=1, keys=keys, min_queries=queries, **small)
    block_plan._reproducible_block_sizes = lambda *_: (queries, keys)
    try:
        yield
    finally:
        backend.tuning, block_plan._reproducible_block_sizes = tuning, sizes


# Strategies

seeds = st.integers(0, 2**16)
offsets = st.integers(-4, 6)


def per_batch(low: int, high: int) -> st.SearchStrategy[Any]:
    """An integer, or one for each sample."""
    return st.integers(low, high) | st.tuples(seeds, st.just(low), st.just(high))


def rules() -> st.SearchStrategy[Any]:
    """Rules and boolean arrays."""
    axes = st.sampled_from(["mn", "n", "m", "hmn", "hn", "bhmn", "bn", "bmn", "bm", ""])
    reach = st.none() | st.integers(0, 5)
    return st.one_of(
        st.tuples(st.just("causal"), per_batch(-3, 5)),
        st.tuples(st.just("window"), reach, reach, per_batch(-3, 5)),
        st.tuples(st.just("lengths"), per_batch(0, 9)),
        st.tuples(st.just("segments"), seeds, st.booleans()),
        st.tuples(st.just("function"), st.integers(1, 4)),
        st.tuples(st.just("array"), axes, seeds, st.sampled_from([0.0, 0.3, 0.7, 1.0])),
    )


@functools.cache
def masks() -> st.SearchStrategy[Any]:
    """Trees of rules; the first part of a combination is a rule, as an array alone has operators of its own."""
    structured = rules().filter(lambda tree: tree[0] != "array")
    combined = st.recursive(
        structured,
        lambda inner: st.one_of(
            st.tuples(st.just("not"), inner),
            st.tuples(st.sampled_from(["and", "or"]), inner, inner | rules()),
        ),
        max_leaves=4,
    )
    return st.none() | rules() | combined


SHAPES = {  # of libraries that compile for every shape: few of them
    "few": [((), 2, 1, 3, 5, 4, 3), ((2,), 4, 2, 5, 7, 3, 3), ((2,), 2, 2, 1, 9, 2, 5)],
    "fewest": [((2,), 4, 2, 5, 7, 3, 4)],
}


@st.composite
def sizes(draw: Any, pool: str | None) -> dict[str, Any]:
    """The sizes of a problem: any, or out of few."""
    names = ("leading", "heads", "groups", "rows", "columns", "width", "value_width")
    if pool is not None:
        return dict(zip(names, draw(st.sampled_from(SHAPES[pool])), strict=True))
    groups, times = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3]))
    long = st.integers(0, 9) | st.integers(1, 9) | st.sampled_from([17, 33])
    leading = draw(st.sampled_from([(), (), (1,), (2,), (2,), (3, 1), (0,), (2, 3)]))
    drawn = leading, groups * times, groups, draw(long), draw(long), draw(st.integers(1, 8)), draw(st.integers(0, 8))
    return dict(zip(names, drawn, strict=True))


@st.composite
def problems(
    draw: Any,
    *,
    pool: str | None = None,
    dtypes: tuple[str, ...] = DTYPES,
    implementations: tuple[str, ...] = ("auto", "dense", "blockwise"),
    arithmetics: tuple[str, ...] = ("fast",),
    with_plants: bool = True,
) -> Problem:
    """Calls of attention that are right."""
    arithmetic = draw(st.sampled_from(arithmetics))
    exact = arithmetic == "reproducible"
    scales = st.none() | st.sampled_from([1.0, 0.5, -0.3, 2.0, 0.0, 1 / 3])
    blocks = st.none() | st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
    axes = st.sampled_from(["mn", "n", "hmn", "h", "bhmn", "bmn", "", "mn -inf", "n -inf", "bhmn -inf"])
    mod = st.one_of(
        st.tuples(st.just("alibi"), offsets),
        st.tuples(st.just("relative"), st.sampled_from([4, 8]), st.booleans(), st.sampled_from([8, 20]), offsets),
        st.tuples(st.just("weighted")),
    )
    implementation = draw(st.sampled_from(implementations))
    return Problem(
        **draw(sizes(pool)),
        dtype=draw(st.sampled_from([each for each in dtypes if not (exact and each == "float64")])),
        seed=draw(seeds),
        values=draw(st.sampled_from(list(MAGNITUDES))),
        mask=draw(masks()),
        is_causal=draw(st.sampled_from([False, False, True])),
        bias=draw(st.none() | axes),
        scale=draw(scales),
        softcap=draw(st.none() | st.sampled_from([1.0, 5.0, 30.0])),
        score_mod=None if exact else draw(st.none() | st.none() | mod),
        sinks=None if exact else draw(st.none() | st.none() | st.sampled_from([0.0, -3.0, 5.0])),
        dropout=draw(st.none() | st.tuples(st.sampled_from([0.1, 0.5, 0.9]), st.integers(0, 2**64 - 1))),
        planted=draw(st.sampled_from([None, None, "key", "value", "key value"])) if with_plants else None,
        implementation=implementation,
        arithmetic=arithmetic,
        blocks=draw(blocks),
        weights=implementation in ("auto", "dense") and draw(st.booleans()),
        logsumexp=draw(st.booleans()),
    )
