"""Attention on NumPy: no framework needed."""

from typing import Any

import attention_core  # noqa: F401 (before its parts, for which two threads would wait for each other)

__all__ = ["backend"]
__dir__ = __all__.copy  # the other modules are inner ones


def __getattr__(name: str) -> Any:
    """Make the backend when it is asked for: what other adapters use of this package imports in a tenth of its time."""
    if name != "backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attention_numpy.numpy_backend import backend  # noqa: PLC0415 (likewise)

    return backend
