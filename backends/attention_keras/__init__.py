"""The layers of attention-core for Keras, on TensorFlow, JAX or PyTorch: ``KERAS_BACKEND`` decides."""

import attention_core  # noqa: F401 (before its parts, for which two threads would wait for each other)
import attention_numpy  # noqa: F401 (likewise)
from attention_keras import layers
from attention_keras.layers import *  # noqa: F403 (the names stand there, once)
from attention_keras.library import backend

__all__ = ["backend"]
__all__ += layers.__all__
