"""Gradients of all implementations, eager and compiled, against the formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fuzz_corpus import GRADIENTS
from fuzz_problems import (
    EPSILON,
    TINY,
    Drawn,
    differentiable,
    dtypes_of,
    gradients,
    pool_of,
    problems,
    relative_bound,
)
from test_fuzz_forward import worst

from attention_conformance.oracle import gradients as oracle
from attention_conformance.oracle.attention import attention
from attention_conformance.oracle.ulps import spacing


def check(drawn: Drawn, backend: Any, mode: str) -> None:
    problem = drawn.problem()
    found = gradients(drawn, problem, backend, lambda function: backend.compile(function, mode=mode))
    sums = drawn.queries * drawn.heads * math.prod(drawn.leading) + drawn.keys
    loose = 4 * float(relative_bound(drawn, attention(problem)).max(initial=0)) + EPSILON[drawn.wide] * (32 + 2 * sums)
    for name, wanted in oracle.gradients(problem).items():
        assert found[name].dtype == problem.arrays[name].dtype, name
        size = wanted.scale
        lost = TINY[drawn.wide] * 2.0**20
        share = worst(found[name], wanted, loose * size + spacing(size, drawn.dtype) + lost)
        assert share <= 1, f"{name}: {share}"


@pytest.mark.needs("gradients")
@pytest.mark.cases(4)
def test_gradients(fuzz, backend):
    drawn = problems(pool=pool_of(backend), dtypes=dtypes_of(backend), arithmetics=("fast", "fast", "reproducible"))
    fuzz(lambda each: check(each, backend, backend.modes[0]), drawn.map(differentiable), GRADIENTS)


@pytest.mark.needs("gradients", lambda backend: backend.name != "torch")
@pytest.mark.cases(1)
def test_gradients_compiled(fuzz, backend):
    """By XLA on JAX, and as a graph and by XLA on TensorFlow; a compiler of PyTorch takes minutes for a case."""
    strategy = problems(pool="few", dtypes=("float32", "float64"), arithmetics=("fast", "fast", "reproducible"))
    modes = iter(backend.modes[1:] * 10**6)
    fuzz(lambda drawn: check(drawn, backend, next(modes)), strategy.map(differentiable))
