"""The implementations of the core as candidates, the same on every framework."""

from __future__ import annotations

import functools
import operator
from typing import Any

import attention_core
from attention_benchmark.candidate import Call
from attention_benchmark.problem import Problem
from attention_core import parameters


def _attention(problem: Problem, **options: Any) -> Call:
    def function(query: Any, key: Any, value: Any, *arrays: Any) -> Any:
        more = problem.core_options(*arrays)
        return attention_core.scaled_dot_product_attention(query, key, value, **options, **more)

    return Call(function, problem.arrays, problem.mask_arrays)


auto, blockwise, dense, fused = (
    functools.partial(_attention, implementation=name) for name in ("auto", "blockwise", "dense", "fused")
)
reproducible = functools.partial(_attention, arithmetic="reproducible")
assume_finite = functools.partial(_attention, assume_finite=True)


def linear(problem: Problem) -> Call:
    """Prepare a reproducible linear map."""

    def function(x: Any, weight: Any) -> Any:
        return attention_core.functions.linear(parameters.Linear(weight), x, arithmetic="reproducible")

    return Call(function, problem.arrays, layout="BLC")


def product(problem: Problem) -> Call:
    """Prepare the same product with the operator ``@``: a peer."""
    return Call(operator.matmul, problem.arrays, layout="BLC")
