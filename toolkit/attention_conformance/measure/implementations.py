"""The implementations of attention: what each is asked, where it is run, when it refuses, and how near it must come."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from attention_conformance.cases.case import Bound, Case, exact_scores
from attention_conformance.measure.question import Question
from attention_conformance.problem import Problem
from attention_core import config_context
from attention_core.backend import Backend, is_on_host

IMPLEMENTATIONS = ("dense", "blockwise", "fused")

RETURNED = {"dense": ("weights", "logsumexp"), "blockwise": ("logsumexp",), "fused": ()}
"""What an implementation returns besides the output; it is asked for nothing else."""

SMALL, LARGE = (2, 4), (64, 1024)
"""Queries and keys in a block: small, so that small problems have several of unequal size; and for many keys."""

REFUSALS = (
    r"expected a call that a fused kernel answers as defined; got one that none does: (?P<reason>.*)",
    r"(?P<reason>expected no return_\w+ .*)",
    r"(?P<reason>expected another implementation with arithmetic='reproducible'.*?); got",
)

COMPILES_BLOCKS = ("jax",)
"""Backends that compile blocks in eager mode as well: about a second for a case, and four for one about gradients."""

# Compilers see programs, not numbers, so that a case of each kind of program will do where each has to be compiled: of
# each kind of mask and of change to the scores, alone and together; of what cannot be read yet (nan behind masks,
# infinite values, rows that may be empty); of several blocks and of many.
COMPILED = (
    "masks-combined",
    "mask-function",
    "causal-offset-per-entry",
    "empty-row-bias",
    "attended-inf-value",
    "score-mod",
    "alibi",
    "dtype-is-kept",
    "grouped-heads",
    "dropout",
    "09-long-row",
    "gradient-mask-and-bias",
    "gradient-structured",
    "gradient-score-mod",
    "gradient-dropout",
)

SLOWEST = {("tensorflow", "xla"): ("masks-combined", "attended-inf-value", "score-mod", "gradient-structured")}
"""Where a compiler takes five seconds for a case. It is XLA, which compiles all the others for JAX."""


def of_implementation(problem: Problem, implementation: str) -> Problem:
    """The problem as an implementation can be asked; as it is where none is named."""
    if not implementation:
        return problem
    refused = {"return_weights", "return_logsumexp"} - {f"return_{name}" for name in RETURNED[implementation]}
    kept = {name: option for name, option in problem.options.items() if name not in refused}
    return replace(problem, options={**kept, "implementation": implementation})


def tuned(backend: Backend, **numbers: int) -> contextlib.AbstractContextManager[Any]:
    """Give a backend other numbers to cut by."""
    return mock.patch.object(backend, "tuning", backend.tuning._replace(**numbers))


def in_small_blocks(backend: Backend, problem: Problem) -> contextlib.AbstractContextManager[None]:
    """Let a backend cut into blocks that are small compared with the problem."""
    queries, keys = SMALL if problem.arrays["key"].shape[-2] <= LARGE[1] else LARGE
    chunk = queries if backend.tuning.query_chunk else 0
    return tuned(backend, queries=queries, keys=keys, min_queries=queries, query_chunk=chunk)


def in_way(question: Question, problem: Problem) -> contextlib.AbstractContextManager[Any]:
    """The context in which the core is asked: of small blocks, and with a look at results that may not be finite."""
    library, stack = question.library, contextlib.ExitStack()
    waits = library is not None and not is_on_host(library.from_numpy(np.zeros(1, np.float32), device=question.device))
    if question.implementation == "blockwise":
        stack.enter_context(in_small_blocks(question.backend, problem))
    if waits:  # an accelerator, which keeps to line 5 under every mask where it is asked to
        is_finite = all(np.isfinite(each.astype(np.float64)).all() for each in problem.arrays.values())
        stack.enter_context(contextlib.nullcontext() if is_finite else config_context(assume_finite=False))
    return stack


def left_out(case: Case, implementation: str, backend: Backend, dtype: str, mode: str) -> str:
    """Why a run of everything leaves out a case of this implementation; empty where it does not."""
    if implementation in ("", "dense"):
        return ""
    if implementation == "fused" and case.measure == "exact":
        return "fused kernels return nothing but the output"
    compiled = mode != "eager" or (implementation == "blockwise" and backend.name in COMPILES_BLOCKS)
    kinds = SLOWEST.get((backend.name, mode), COMPILED)
    if compiled and (case.name not in kinds or dtype not in case.compiled):
        return f"one {implementation} case of each kind of program is run where it has to be compiled"
    return ""


def is_quick(backend: Backend, mode: str, dtype: str, implementation: str) -> bool:
    """Whether a run within a minute has time for this way: nothing is compiled by case, and numbers are of one type."""
    compiles = implementation == "blockwise" and backend.name in COMPILES_BLOCKS
    return mode == "eager" and dtype == "float32" and not compiles


def refusal(error: Exception) -> str:
    """Why an implementation does not take a call; empty where the error is another. Compilers wrap what they trace."""
    for pattern in REFUSALS:
        match = re.search(pattern, str(error))
        if match:
            return match["reason"].removesuffix(")").rstrip("'\"")
    return ""


LEAST = {
    ("fused", "float16"): 2.0,
    ("fused", "bfloat16"): 2.0,
    ("fused", "float32"): 12.0,
    ("blockwise", "float32"): 8.0,
}
"""The units that an implementation may always be off by."""


def bound_of(implementation: str, bound: Bound, dtype: str, kappa: float) -> float:
    r"""Bound the error of a case in an implementation, which may need more than the definition.

    * Fused kernels of 16-bit types: 2 units, of which 1.9 were seen. They round the weights before the average, and the
      scaled query.
    * Fused kernels in float32: 12 units, of which 9.1 were seen on a GPU, and 4.5 on a CPU. They compute exponentials
      and sums in another way.
    * Blocks in float32: 8 units, of which 6.7 were seen. They add up in another order, and scale the sums at each new
      maximum.
    * Blocks in float64 where scores are exact: :math:`\kappa / 4` units more, of which 0.8 were seen. Exponents of
      powers of 2 are rounded, as far as a weight is left (:math:`e^{-745}`).
    """
    stated = max(bound(dtype, kappa), LEAST.get((implementation, dtype), 0.0))
    is_exact = implementation == "blockwise" and dtype == "float64" and bound is exact_scores
    return stated + (min(kappa, 745.0) / 4 if is_exact else 0.0)
