"""JAX and its attention."""

from __future__ import annotations

import functools
from typing import Any

import jax

from attention_benchmark.frameworks import Engine, Step, with_mask
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


xla, cudnn = (
    functools.partial(with_mask, function=functools.partial(jax.nn.dot_product_attention, implementation=name))
    for name in (None, "cudnn")
)
