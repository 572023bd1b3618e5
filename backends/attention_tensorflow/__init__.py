"""Attention on TensorFlow."""

from attention_tensorflow.backend import backend

__all__ = ["backend"]
