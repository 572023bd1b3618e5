"""Attention on PyTorch: the backend, and layers that are modules."""

import attention_core  # noqa: F401 (before its parts, for which two threads would wait for each other)
import attention_numpy  # noqa: F401 (likewise)
from attention_torch import layers
from attention_torch.backend import backend
from attention_torch.layers import *  # noqa: F403 (the names stand there, once)

__all__ = ["backend"]
__all__ += layers.__all__
