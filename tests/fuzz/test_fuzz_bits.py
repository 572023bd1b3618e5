"""Reproducible arithmetic: the same bits on every library, in every implementation and size of blocks, and of gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import fuzz_oracle as oracle
import numpy as np
import pytest
from fuzz_problems import Built, Problem, arrays_of, differentiating, forced_blocks, planted, problems
from test_fuzz_forward import pool_of

import attention_core as ac
from attention_core.backend import get_backend

NUMPY = get_backend("numpy")
HALVES = ("float32", "float16", "bfloat16")


def results(problem: Problem, backend: Any, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    built = Built(problem, backend.from_numpy, arrays)
    with forced_blocks(problem, backend):
        found = ac.scaled_dot_product_attention(*built.qkv, **built.options() | {"return_logsumexp": True})
    return [backend.to_numpy(each) for each in found if each is not None]


def assert_same_bits(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        differ = np.frombuffer(one.tobytes(), np.uint8) != np.frombuffer(other.tobytes(), np.uint8)
        assert not differ.any(), f"{differ.sum()} bytes of {differ.size} differ: {one.ravel()[:4]} {other.ravel()[:4]}"


def check_forward(problem: Problem, backend: Any) -> str | None:
    arrays = arrays_of(problem)
    arrays = planted(problem, arrays, oracle.allowed_pairs(problem, arrays))
    whole = dataclasses.replace(problem, blocks=None, implementation="dense")
    assert_same_bits(results(problem, backend, arrays), results(whole, NUMPY, arrays))


def check_gradients(problem: Problem, backend: Any, compiled: Any) -> str | None:
    """In two sizes of blocks on one library; `test_backward_across_libraries` compares libraries."""
    found, expected = (
        gradients(problem, backend, compiled),
        gradients(dataclasses.replace(problem, blocks=None), backend, compiled),
    )
    assert_same_bits(found, expected)


def gradients(problem: Problem, backend: Any, compiled: Any = lambda function: function) -> list[np.ndarray]:
    """Of the sum of output times random numbers: every library multiplies and rounds alike, and only the sum differs."""
    xp, arrays = backend.namespace, arrays_of(problem)
    dims = (*problem.leading, problem.heads, problem.rows, problem.value_width)
    cotangent = np.random.default_rng(problem.seed + 2).standard_normal(dims).astype(np.float32)
    built = Built(problem, backend.from_numpy, arrays)
    names = [name for name in arrays if name in ("query", "key", "value", "bias")]
    factor, rest = backend.from_numpy(cotangent), built.options()

    def loss(*variables: Any) -> Any:
        replaced = dict(zip(names, variables, strict=True))
        options = rest | ({"bias": replaced["bias"]} if "bias" in replaced else {})
        output = ac.scaled_dot_product_attention(replaced["query"], replaced["key"], replaced["value"], **options)
        return xp.sum(xp.multiply(xp.astype(output, xp.float32), factor))

    def everything(*variables: Any) -> Any:
        return backend.value_and_grad(loss)(*variables)[1]

    with forced_blocks(problem, backend):
        return [backend.to_numpy(each) for each in compiled(everything)(*(built.arrays[name] for name in names))]


def differentiable(problem: Problem) -> Problem:
    return dataclasses.replace(
        problem, weights=False, logsumexp=False, leading=problem.leading if 0 not in problem.leading else ()
    )


def exact_problems(backend: Any) -> Any:
    pool, dtypes = pool_of(backend), tuple(name for name in HALVES if name in backend.dtypes)
    return problems(pool=pool, dtypes=dtypes, arithmetics=("reproducible",))


@pytest.mark.needs(lambda backend: backend.name != "array_api_strict")
def test_bits(fuzz, backend):
    fuzz(lambda problem: check_forward(problem, backend), exact_problems(backend))


@pytest.mark.needs("gradients")
@pytest.mark.cases(3)
def test_bits_of_gradients(fuzz, backend):
    fuzz(lambda problem: check_gradients(problem, backend, lambda f: f), exact_problems(backend).map(differentiable))


@pytest.mark.needs(lambda: len(differentiating()) > 1)
@pytest.mark.cases(1)
def test_bits_of_gradients_across_libraries(fuzz, several):
    """Every library against the first, which is PyTorch where it is there; JAX and TensorFlow also compiled."""

    def check(problem: Problem) -> None:
        first, *others = several
        expected = gradients(problem, first)
        for backend in others:
            for mode in (backend.modes[0], backend.modes[-1]):
                assert_same_bits(
                    gradients(problem, backend, lambda f, b=backend, m=mode: b.compile(f, mode=m)), expected
                )

    fuzz(check, problems(pool="few", dtypes=HALVES, arithmetics=("reproducible",)).map(differentiable))
