"""Attention on NumPy: no framework needed."""

import importlib.util

import attention_core  # noqa: F401 (before its parts, for which two threads would wait for each other)

if importlib.util.find_spec("numpy") is not None:  # PyTorch, which can do without, uses the helpers here, too
    from attention_numpy.backend import backend

__all__ = ["backend"]
__dir__ = __all__.copy  # the other modules are inner ones
