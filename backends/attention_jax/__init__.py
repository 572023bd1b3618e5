"""Attention on JAX."""

from attention_jax.backend import backend

__all__ = ["backend"]
