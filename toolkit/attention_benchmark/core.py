"""The implementations of the core as candidates, the same on every framework."""

from __future__ import annotations

import functools
from typing import Any

import attention_core
from attention_benchmark.candidate import Call
from attention_benchmark.problem import Problem


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
