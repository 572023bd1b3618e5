"""A framework each: how it runs a function, and the peers that it brings along.

Every module is imported in the process of its framework only. It has an ``engine`` as `Engine` describes it, and a
function from a problem to a call for every peer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from attention_core import Backend

__all__ = ["Engine", "Step", "device_of"]

Step: TypeAlias = Callable[[tuple[Any, ...], tuple[Any, ...], Any], tuple[Any, ...]]


class Engine(Protocol):
    """How a framework runs, is waited for, and tells its peak memory.

    Attributes
    ----------
    backend : Backend
    matmul : callable
        The product of two matrices.
    """

    backend: Backend
    matmul: Callable[..., Any]

    def step(self, function: Callable[..., Any], mode: str, backward: bool, /) -> Step:
        """Make a function of variables, constants and the cotangent to the output, and, if asked for, gradients."""

    def wait(self, result: Any, /) -> None:
        """Return once the result is there."""

    def peak(self, step: Step, arguments: tuple[Any, ...], /) -> int | None:
        """Bytes on an accelerator that a step needs besides its arguments; ``None`` where only the system can tell."""


def device_of(backend: Backend, kind: str) -> str:
    """The first device of a kind, such as ``"cpu"`` or ``"cuda"``, under the framework's own name for it."""
    names = [name for name in backend.devices() if name.lower().startswith(kind)]
    if not names:
        raise ValueError(f"expected a device out of {', '.join(backend.devices())}; got {kind!r}")
    return names[0]
