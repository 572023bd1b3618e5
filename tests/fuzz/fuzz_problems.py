"""Problems of attention as the kit draws them, in blocks of the core, and what their errors may be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from drawn_calls import Drawn, problems as drawn_problems
from hypothesis import strategies as st

import attention_core as ac
from attention_conformance.call import output_function
from attention_conformance.oracle.attention import Truth
from attention_conformance.problem import DTYPES, Problem
from attention_core._attention.blocks import plan as block_plan

EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52}
TINY = {"float32": 2.0**-126, "float64": 2.0**-1022}


@dataclass(frozen=True, repr=False)
class Blocked(Drawn):
    """One call, and how many blocks there are: of queries, of keys, and of keys in the backward pass."""

    blocks: tuple[int, int, int] | None = None

    @property
    def is_exact(self) -> bool:
        return self.options.get("arithmetic") == "reproducible"

    @property
    def wide(self) -> str:
        """The type that the call is computed in."""
        return "float64" if self.dtype == "float64" else "float32"

    def told(self, **options: Any) -> Blocked:
        """The same with other options; None leaves one out."""
        return replace(
            self, options={name: each for name, each in (self.options | options).items() if each is not None}
        )


def differentiating() -> list[Any]:
    """The backends asked for whose library differentiates, PyTorch first."""
    asked = [
        name for name in os.environ.get("ATTENTION_CORE_BACKENDS", "").split(",") if name
    ] or ac.backend.available_backends()
    return [ac.backend.get_backend(name) for name in ("torch", "jax", "tensorflow") if name in asked]


def called(drawn: Blocked, problem: Problem, backend: Any) -> dict[str, np.ndarray]:
    """What a call returns: the output, logsumexp, and weights where they are asked for."""
    asked = problem.changed(options=problem.options | {"return_logsumexp": True})
    with forced_blocks(drawn, backend):
        found = output_function(ac.scaled_dot_product_attention, asked)(backend.from_numpy(dict(problem.arrays)))
    return {name: backend.to_numpy(each) for name, each in found.items()}


def gradients(
    drawn: Blocked, problem: Problem, backend: Any, compiled: Callable[..., Any] = lambda function: function
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
def forced_blocks(drawn: Blocked, backend: Any) -> Iterator[None]:
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


def relative_bound(drawn: Blocked, truth: Truth) -> np.ndarray:
    """By how much a row of weights may be off, relative: derived from the sums that are rounded.

    A score is a sum of D products, rounded D + 5 times at the magnitude κ; a total is one of N + 1 exponentials.
    """
    roundings = (drawn.width + 6) * kappas(truth) + drawn.keys + 12
    return np.expm1(np.minimum(EPSILON[drawn.wide] * roundings, 300.0))


def kappas(truth: Truth) -> np.ndarray:
    """The magnitude of the scores of each row."""
    return truth.logsumexp.scale - 1


# Strategies

NAMES = ("leading", "heads", "groups", "queries", "keys", "width", "value_width")
SHAPES = {  # of libraries that compile for every shape: few of them
    "few": [((), 2, 1, 3, 5, 4, 3), ((2,), 4, 2, 5, 7, 3, 3), ((2,), 2, 2, 1, 9, 2, 5)],
}
OFFERS = ("mask", "is_causal", "bias", "scale", "softcap", "dropout")


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
) -> Blocked:
    """Calls of attention that are right, in all ways of computing them."""
    arithmetic = draw(st.sampled_from(arithmetics))
    implementation = draw(st.sampled_from(("auto", "dense", "blockwise")))
    if arithmetic == "reproducible":
        offers, dtypes = OFFERS, tuple(each for each in dtypes if each != "float64")
    else:
        offers = (*OFFERS, "score_mod", "sinks")
    found = draw(drawn_problems(sizes(pool), (*offers, "planted"), dtypes=dtypes))
    weights = implementation != "blockwise" and draw(st.booleans())
    blocks = draw(st.none() | st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)))
    drawn = Blocked(**vars(found), blocks=blocks)
    return drawn.told(implementation=implementation, arithmetic=arithmetic, return_weights=True if weights else None)


def pool_of(backend: Any) -> str | None:
    """Few shapes where every one is compiled."""
    return "few" if backend.name in ("jax", "tensorflow") else None


def dtypes_of(backend: Any) -> tuple[str, ...]:
    return tuple(name for name in DTYPES if name in backend.dtypes)


def differentiable(drawn: Blocked) -> Blocked:
    """Infinite biases are left to the forward pass, and the results that are not differentiated as well."""
    bias = drawn.bias and drawn.bias.partition(" ")[0]
    return replace(drawn.told(return_weights=None), gradient=True, bias=bias)
