"""The backend of a library that announces none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attention_core._arrays import Array, Namespace
from attention_core._backend._loops import PythonLoops
from attention_core._backend._protocol import Kernel, Loops, Operation, Tuning


class DefaultBackend:
    """Loops in Python, and nothing that is known of devices, values or gradients."""

    modes: tuple[str, ...] = ("eager",)
    dtypes: tuple[str, ...] = ("float32", "float64")
    differentiates = False
    tuning = Tuning(queries=2048, keys=512, min_queries=64, dense_below=512 * 512, structured_below=256 * 256)
    kernels: tuple[Kernel, ...] = ()

    def __init__(self, xp: Namespace) -> None:
        self.name: str = xp.__name__.partition(".")[0]
        self.namespace = xp
        self.loops: Loops = PythonLoops(xp)

    def versions(self) -> dict[str, str]:
        """Return nothing: the distribution of the library is not known."""
        return {}

    def owns(self, array: Array, /) -> bool:
        """Return False: no class of arrays is known to be of the library."""
        return False

    def is_concrete(self, array: Array, /) -> bool:
        """Return False: it is not known whether values can be read without computing them."""
        return False

    def devices(self) -> list[str]:
        return []

    def compile(self, function: Callable[..., Any], /, *, mode: str | None = None) -> Callable[..., Any]:
        return function

    def stop_gradient(self, array: Array, /) -> Array:
        return array

    def draw_seed(self, source: Any, /) -> Any:
        return source

    def custom_gradient(self, operation: Operation, plan: Any, arrays: tuple[Array, ...], /) -> tuple[Array, ...]:
        """Compute forward. A library that differentiates by itself still does."""
        return operation.forward(plan, arrays, self)

    def _missing(self, *_: Any, **__: Any) -> Any:
        """Raise: transfer and gradients need a backend."""
        raise TypeError(f"expected a library with a backend; got {self.name}, which announces none")

    from_numpy = to_numpy = to_device = value_and_grad = vjp = _missing
