"""Attention on JAX."""

import attention_core  # noqa: F401 (before its parts, for which two threads would wait for each other)
import attention_numpy  # noqa: F401 (likewise)
from attention_jax import layers
from attention_jax.backend import backend
from attention_jax.layers import *  # noqa: F403 (the names stand there, once)
from attention_jax.masks import register_mask

__all__ = ["backend", "register_mask"]
__all__ += layers.__all__
