"""Attention on NumPy: no framework needed."""

from attention_numpy.backend import backend

__all__ = ["backend"]
