"""One module for each framework: its engine, and its peers.

A module is imported in the process of its framework only. It has an `Engine` as ``engine``, and a function from a
problem to a call for each peer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from attention_benchmark.candidate import Call
from attention_benchmark.problem import Problem, laid_out
from attention_core.backend import Backend
from attention_numpy.trees import devices_of_kind

__all__ = ["Engine", "Step", "device_of", "with_mask"]

Step: TypeAlias = Callable[[tuple[Any, ...], tuple[Any, ...], Any], tuple[Any, ...]]


class Engine:
    """Runs functions of a framework, waits for results, and measures peak memory: on a host that waits by itself."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def step(self, function: Callable[..., Any], mode: str, backward: bool, /) -> Step:
        """Make a function of variables, constants and cotangent that returns the output and, if asked, gradients.

        Where a framework compiles, it compiles both together.
        """

        def forward(variables: Any, constants: Any, cotangent: Any) -> tuple[Any, ...]:
            return (function(*variables, *constants),)

        def both(variables: Any, constants: Any, cotangent: Any) -> tuple[Any, ...]:
            output, pullback = self.backend.vjp(lambda *variables: function(*variables, *constants), *variables)
            return output, *pullback(cotangent)

        return self.backend.compile(both if backward else forward, mode=mode)

    def wait(self, result: Any, /) -> None:
        """Return once the result is computed."""

    def peak_memory(self, step: Step, arguments: tuple[Any, ...], /) -> int | None:
        """Bytes on an accelerator that a step needs besides its arguments; ``None`` on the CPU."""
        return None


def device_of(backend: Backend, kind: str) -> str:
    """The framework's name of its first device of a kind, such as ``"cpu"`` or ``"cuda"``."""
    names = devices_of_kind(kind, backend.devices())
    if not names:
        raise ValueError(f"expected a device out of {', '.join(backend.devices())}; got {kind!r}")
    return names[0]


def with_mask(problem: Problem, *, function: Callable[..., Any]) -> Call:
    """Prepare a peer that has axes (B, L, H, D), a flag for causal, and an array for any other mask."""
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
