"""Peers of Keras, on the framework of this process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from attention_benchmark.candidate import Call
from attention_benchmark.problem import Problem, laid_out


def attention(problem: Problem) -> Call:
    """Prepare the function that Keras has for all its backends; TensorFlow has to repeat heads for it."""
    arrays, keys, constants = problem.for_peer()

    def function(query: Any, key: Any, value: Any, *mask: Any) -> Any:
        key, value = key[:, keys], value[:, keys]
        if problem.group > 1:
            key, value = (keras.ops.repeat(each, problem.group, axis=2) for each in (key, value))
        if problem.mask == "sinks":
            return keras.ops.dot_product_attention(query, key, value, *mask)
        return keras.ops.dot_product_attention(query, key, value, None, *mask, is_causal=problem.is_causal)

    variables = tuple(laid_out(each, "BLHD") for each in arrays)
    return Call(function, variables, constants, "BLHD")


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
