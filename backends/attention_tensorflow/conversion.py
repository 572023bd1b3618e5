"""The conversions of `attention_keras`, under the address that they had when Keras ran on TensorFlow alone."""

from attention_keras.conversion import from_module, to_module
from attention_tensorflow import layers as layers  # which refuse another library

__all__ = ["from_module", "to_module"]
