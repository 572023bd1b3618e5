"""The backend of a library that announces none."""

from __future__ import annotations

from typing import Any

from attention_core._arrays import Array, Namespace
from attention_core._backend._loops import PythonLoops
from attention_core._backend._protocol import Tuning


class DefaultBackend:
    """What attention in blocks needs of a library that has no backend: loops, but no gradient."""

    tuning = Tuning(queries=2048, keys=512, least=64, dense_below=512 * 512, structured_below=256 * 256)
    kernels = ()

    def __init__(self, xp: Namespace) -> None:
        self.namespace = xp
        self.loops = PythonLoops(xp)

    def custom_gradient(self, operation: Any, plan: Any, arrays: tuple[Array, ...]) -> Any:
        """Compute; what the library differentiates by itself it still does."""
        return operation.forward(plan, arrays, self)
