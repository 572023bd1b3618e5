"""The implementations of attention: what each is asked, where it is run, when it refuses, and how near it must come."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from attention_conformance.case import Bound, Case, exact_scores, hard
from attention_conformance.problem import Problem
from attention_core import Backend

__all__ = ["IMPLEMENTATIONS", "asked", "bound_of", "in_small_blocks", "left_out", "refusal"]

IMPLEMENTATIONS = ("dense", "blockwise", "fused")

RETURNED = {"dense": ("weights", "logsumexp"), "blockwise": ("logsumexp",), "fused": ()}
"""What an implementation returns beside the output; it is asked for nothing else."""

SMALL, LARGE = (2, 3), (64, 1024)
"""Queries and keys in a block: few, so that small problems have several blocks that do not come out even; and many."""

REFUSALS = (
    r"expected a call that a fused kernel answers as defined; got one that none does: (?P<reason>.*)",
    r"(?P<reason>expected no return_\w+ .*)",
)

COMPILES_BLOCKS = ("jax",)
"""Backends that compile blocks in eager mode as well, and take as long as in a compiled mode."""

# Compilers see programs, not numbers: in compiled modes, one case of each kind of program is enough.
COMPILED = (
    "mask-and-bias",
    "masks-combined",
    "mask-function",
    "causal-more-keys",
    "causal-offset-per-entry",
    "empty-row-lengths",
    "empty-row-bias",
    "masked-nan-value",
    "attended-inf-value",
    "attended-nan-key",
    "weights-change-nothing-unmasked",
    "softcap-before-bias-and-mask",
    "score-mod",
    "alibi",
    "sinks",
    "dtype-is-kept",
    "grouped-heads",
    "no-keys",
    "dropout",
    "pieces",
    "documents-in-a-window",
    "04-near-ties-1e4",
    "09-long-row",
    "12-product-overflows",
    "gradient",
    "gradient-mask-and-bias",
    "gradient-structured",
    "gradient-masked-rubbish",
    "gradient-score-mod",
    "gradient-sinks",
    "gradient-dropout",
)


def asked(problem: Problem, implementation: str | None) -> Problem:
    """The problem as an implementation can be asked; as it is where none is named."""
    if implementation is None:
        return problem
    refused = {"return_weights", "return_logsumexp"} - {f"return_{name}" for name in RETURNED[implementation]}
    kept = {name: option for name, option in problem.options.items() if name not in refused}
    return replace(problem, options={**kept, "implementation": implementation})


@contextlib.contextmanager
def in_small_blocks(backend: Backend, problem: Problem) -> Iterator[None]:
    """Let a backend cut into blocks that are small beside the problem."""
    tuning, columns = backend.tuning, problem.sizes[-1]
    backend.tuning = tuning._replace(blocks=SMALL if columns <= LARGE[1] else LARGE)
    try:
        yield
    finally:
        backend.tuning = tuning


def left_out(case: Case, implementation: str | None, backend: Backend, dtype: str, mode: str) -> str:
    """Why a run of everything leaves out a case of this implementation; empty where it does not."""
    if implementation in (None, "dense"):
        return ""
    if implementation == "fused" and case.measure == "exact":
        return "fused kernels return nothing beside the output"
    if mode != "eager" and case.name not in COMPILED and case.measure != "message":
        return f"compiled modes run one {implementation} case of each kind of program"
    if implementation == "blockwise" and backend.name in COMPILES_BLOCKS and dtype not in case.compiled:
        return f"{backend.name} compiles blocks in all modes, which run this case in {', '.join(case.compiled)}"
    return ""


def refusal(error: Exception) -> str:
    """Why an implementation does not take a call; empty where the error is another. Compilers wrap what they trace."""
    for pattern in REFUSALS:
        found = re.search(pattern, str(error))
        if found:
            return found["reason"].removesuffix(")").rstrip("'\"")
    return ""


def bound_of(implementation: str | None, bound: Bound) -> Bound:
    """The bound of a case for this implementation."""
    own = OWN.get(implementation or "")
    return bound if own is None else own(bound)


OWN: dict[str, Callable[[Bound], Bound]] = {}
