"""Peers of Keras, on the framework of this process."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np

from attention_benchmark.candidate import Call
from attention_benchmark.frameworks import with_mask
from attention_benchmark.problem import Problem


def _attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """The function that Keras has for all its backends; TensorFlow has to repeat heads for it."""
    group = query.shape[2] // key.shape[2]
    if group > 1:
        key, value = (keras.ops.repeat(each, group, axis=2) for each in (key, value))
    return keras.ops.dot_product_attention(query, key, value, **options)


attention = functools.partial(with_mask, function=_attention)


def multi_head(problem: Problem) -> Call:
    """Prepare the layer, with the weights of the problem as its parameters."""
    _, heads, _, width = problem.shape
    x, *projections = problem.arrays
    channels = x.shape[-1]
    *inner, weight, bias = projections
    layer = keras.layers.MultiHeadAttention(heads, width, dtype=problem.dtype)
    layer.build(x.shape, x.shape, x.shape)
    split = [each.reshape(*each.shape[:-1], heads, width) for each in inner]
    parameters = (*split, weight.reshape(heads, width, channels), bias)
    untrained = [variable.value for variable in layer.non_trainable_variables]

    def function(x: Any, *arrays: Any) -> Any:
        output, _ = layer.stateless_call(list(arrays), untrained, x, x, use_causal_mask=problem.is_causal)
        return output

    return Call(function, (x, *map(np.ascontiguousarray, parameters)), (), "BLC")
