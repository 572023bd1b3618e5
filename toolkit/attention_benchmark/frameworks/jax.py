"""JAX and its attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from attention_benchmark.candidate import Call
from attention_benchmark.frameworks import Engine, Step
from attention_benchmark.problem import Problem, laid_out
from attention_jax import backend


class JaxEngine(Engine):
    """JAX: a function and its gradients are compiled together."""

    def wait(self, result: Any, /) -> None:
        """Wait for all arrays."""
        jax.block_until_ready(result)

    def peak_memory(self, step: Step, arguments: tuple[Any, ...], /) -> int | None:
        """Ask the compiler: the allocator also counts trial runs while compiling."""
        if next(iter(arguments[2].devices())).platform == "cpu":
            return None
        sizes = step.lower(*arguments).compile().memory_analysis()  # type: ignore[attr-defined]
        return int(sizes.temp_size_in_bytes + sizes.output_size_in_bytes)


engine = JaxEngine(backend)


def with_mask(problem: Problem, *, function: Callable[..., Any]) -> Call:
    """Prepare a function with a flag for causal, and an array for any other mask."""
    arrays, keys, constants = problem.for_peer()

    def masked(query: Any, key: Any, value: Any, *mask: Any) -> Any:
        key, value = key[:, keys], value[:, keys]
        if problem.mask == "bias":
            return function(query, key, value, bias=mask[0][None, None])
        if problem.mask == "sinks":
            return function(query, key, value, bias=mask[0])
        return function(query, key, value, mask=mask[0] if mask else None, is_causal=problem.is_causal)

    variables = tuple(laid_out(each, "BLHD") for each in arrays)
    return Call(masked, variables, constants, "BLHD")


xla, cudnn = (
    functools.partial(with_mask, function=functools.partial(jax.nn.dot_product_attention, implementation=name))
    for name in (None, "cudnn")
)
