"""Reproducible arithmetic: the same bits on every library, in every implementation and size of blocks, and of gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fuzz_problems import Drawn, called, differentiating, dtypes_of, gradients, pool_of, problems

from attention_core.backend import get_backend

NUMPY = get_backend("numpy")
HALVES = ("float32", "float16", "bfloat16")


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, one in found.items():
        other = expected[name]
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        differ = np.frombuffer(one.tobytes(), np.uint8) != np.frombuffer(other.tobytes(), np.uint8)
        assert not differ.any(), f"{differ.sum()} bytes of {differ.size} differ: {one.ravel()[:4]} {other.ravel()[:4]}"


def check_forward(drawn: Drawn, backend: Any) -> None:
    whole = replace(drawn, blocks=None).told(implementation="dense")
    assert_same_bits(called(drawn, drawn.problem(), backend), called(whole, whole.problem(), NUMPY))


def check_gradients(drawn: Drawn, backend: Any) -> None:
    """In two sizes of blocks on one library; `test_backward_across_libraries` compares libraries."""
    problem = drawn.problem()
    assert_same_bits(gradients(drawn, problem, backend), gradients(replace(drawn, blocks=None), problem, backend))


def differentiable(drawn: Drawn) -> Drawn:
    leading = drawn.leading if 0 not in drawn.leading else ()
    return replace(drawn.told(return_weights=None), leading=leading, gradient=True, planted=None)


def exact_problems(backend: Any) -> Any:
    dtypes = tuple(name for name in HALVES if name in dtypes_of(backend))
    return problems(pool=pool_of(backend), dtypes=dtypes, arithmetics=("reproducible",))


@pytest.mark.needs(lambda backend: backend.name != "array_api_strict")
def test_bits(fuzz, backend):
    fuzz(lambda drawn: check_forward(drawn, backend), exact_problems(backend))


@pytest.mark.needs("gradients")
@pytest.mark.cases(3)
def test_bits_of_gradients(fuzz, backend):
    fuzz(lambda drawn: check_gradients(drawn, backend), exact_problems(backend).map(differentiable))


@pytest.mark.needs(lambda: len(differentiating()) > 1)
@pytest.mark.cases(1)
def test_bits_of_gradients_across_libraries(fuzz, several):
    """Every library against the first, which is PyTorch where it is there; JAX and TensorFlow also compiled."""

    def compiled(backend: Any, mode: str) -> Callable[..., Any]:
        return lambda function: backend.compile(function, mode=mode)

    def check(drawn: Drawn) -> None:
        (first, *others), problem = several, drawn.problem()
        expected = gradients(drawn, problem, first)
        for backend in others:
            for mode in (backend.modes[0], backend.modes[-1]):
                assert_same_bits(gradients(drawn, problem, backend, compiled(backend, mode)), expected)

    fuzz(check, problems(pool="few", dtypes=HALVES, arithmetics=("reproducible",)).map(differentiable))
