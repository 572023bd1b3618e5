"""Attention on TensorFlow: the backend. Layers for Keras on TensorFlow are those of `attention_keras`."""

import attention_core  # noqa: F401 (before its parts, for which two threads would wait for each other)
import attention_numpy  # noqa: F401 (likewise)
from attention_tensorflow.backend import backend

__all__ = ["backend"]
__dir__ = __all__.copy  # the other modules are inner ones
