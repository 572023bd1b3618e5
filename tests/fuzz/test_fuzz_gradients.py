"""Gradients of all implementations, eager and compiled, against the formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

import fuzz_oracle as oracle
import numpy as np
import pytest
from fuzz_corpus import GRADIENTS
from fuzz_problems import Built, Problem, arrays_of, forced_blocks, planted, problems
from test_fuzz_forward import mixed_channels, pool_of, worst

import attention_core as ac


def gradients(
    problem: Problem, backend: Any, arrays: dict[str, np.ndarray], g: np.ndarray, mode: str
) -> dict[str, np.ndarray]:
    xp, names = backend.namespace, list(arrays)
    built, factor = Built(problem, backend.from_numpy, arrays), backend.from_numpy(g)
    wide = getattr(xp, g.dtype.name)

    def loss(*variables: Any) -> Any:
        replaced = dict(zip(names, variables, strict=True))
        output = ac.scaled_dot_product_attention(
            replaced["query"], replaced["key"], replaced["value"], **built.options(replaced)
        )
        return xp.sum(xp.multiply(xp.astype(output, wide), factor))

    with forced_blocks(problem, backend):
        compiled = backend.compile(lambda *variables: backend.value_and_grad(loss)(*variables)[1], mode=mode)
        found = compiled(*(built.arrays[name] for name in names))
    return dict(zip(names, map(backend.to_numpy, found), strict=True))


def check(problem: Problem, backend: Any, mode: str) -> str:
    arrays = arrays_of(problem)
    arrays = planted(problem, arrays, oracle.allowed_pairs(problem, arrays))
    truth = oracle.attention(problem, arrays)
    dims, wide = truth.output.shape, "float64" if problem.dtype == "float64" else "float32"
    g = np.random.default_rng(problem.seed + 2).standard_normal(dims).astype(wide)
    found = gradients(problem, backend, arrays, g, mode)
    rounded = g.astype(arrays["query"].dtype)  # the cast of the output back to the type of the loss rounds it
    wanted = oracle.gradients(problem, arrays, truth, rounded)
    exact, epsilon = problem.arithmetic == "reproducible", oracle.EPSILON[wide]
    sums = problem.rows * problem.heads * int(np.prod(problem.leading)) + problem.columns
    loose = 4 * float(oracle.relative_bound(problem, truth).max(initial=0)) + epsilon * (32 + 2 * sums)
    loose += 8 * float(mixed_channels(problem, arrays).max(initial=0)) if exact else 0  # MIXED_CHANNELS
    for name, (number, size) in wanted.items():
        assert found[name].dtype == arrays[name].dtype, name
        size = size.astype(float)
        lost = oracle.TINY[wide] * 2.0**20 + (cut(problem) * size.max(initial=0) if exact else 0)  # SMALL_WEIGHTS
        share = worst(found[name], number, loose * size + oracle.spacing(size, problem.dtype) + lost)
        assert share <= 1, f"{name}: {share}"
    return f"{problem.arithmetic} {mode}"


def cut(problem: Problem) -> float:
    """By how much reproducible arithmetic cuts gradients of scores below the bound of their row."""
    return 2.0**-18 if problem.dtype == "float32" else 2.0**-10


def differentiable(problem: Problem) -> Problem:
    """Infinite biases are left to the forward pass, and the results that are not differentiated as well."""
    bias = problem.bias and problem.bias.partition(" ")[0]
    return dataclasses.replace(problem, weights=False, logsumexp=False, bias=bias)


@pytest.mark.needs("gradients")
@pytest.mark.cases(4)
def test_gradients(fuzz, backend):
    dtypes = tuple(name for name in ("float32", "float64", "float16", "bfloat16") if name in backend.dtypes)
    strategy = problems(pool=pool_of(backend), dtypes=dtypes, arithmetics=("fast", "fast", "reproducible"))
    fuzz(lambda problem: check(problem, backend, backend.modes[0]), strategy.map(differentiable), GRADIENTS)


@pytest.mark.needs("gradients", lambda backend: backend.name != "torch")
@pytest.mark.cases(1)
def test_gradients_compiled(fuzz, backend):
    """By XLA on JAX, and as a graph and by XLA on TensorFlow; a compiler of PyTorch takes minutes for a case."""
    strategy = problems(pool="few", dtypes=("float32", "float64"), arithmetics=("fast", "fast", "reproducible"))
    modes = iter(backend.modes[1:] * 10**6)
    fuzz(lambda problem: check(problem, backend, next(modes)), strategy.map(differentiable))
