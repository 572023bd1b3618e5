"""Attention on NumPy: no framework needed."""

import importlib.util

if importlib.util.find_spec("numpy") is not None:  # PyTorch, which can do without, uses the helpers here, too
    from attention_numpy.backend import backend

__all__ = ["backend"]
