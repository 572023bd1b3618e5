"""Peers of Keras, on the framework of this process."""

from __future__ import annotations

import functools
from typing import Any

import keras

from attention_benchmark.frameworks import with_mask


def _attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """The function that Keras has for all its backends; TensorFlow has to repeat heads for it."""
    group = query.shape[2] // key.shape[2]
    if group > 1:
        key, value = (keras.ops.repeat(each, group, axis=2) for each in (key, value))
    return keras.ops.dot_product_attention(query, key, value, **options)


attention = functools.partial(with_mask, function=_attention)
