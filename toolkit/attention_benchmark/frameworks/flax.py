"""Peers of Flax."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

from attention_benchmark.candidate import Call
from attention_benchmark.frameworks import with_mask
from attention_benchmark.problem import Problem

attention = functools.partial(with_mask, function=nnx.dot_product_attention)


def multi_head(problem: Problem) -> Call:
    """Prepare the layer, with the weights of the problem as its parameters."""
    _, heads, _, width = problem.shape
    x, *projections = problem.arrays
    channels = x.shape[-1]
    layer = nnx.eval_shape(lambda: nnx.MultiHeadAttention(heads, channels, decode=False, rngs=nnx.Rngs(0)))
    for name, weight, bias in zip(("query", "key", "value"), projections[:6:2], projections[1:6:2], strict=True):
        inner = getattr(layer, name)
        inner.kernel.set_value(weight.reshape(channels, heads, width))
        inner.bias.set_value(bias.reshape(heads, width))
    layer.out.kernel.set_value(projections[6].reshape(heads, width, channels))
    layer.out.bias.set_value(projections[7])
    graph, state, rest = nnx.split(layer, nnx.Param, ...)
    leaves, tree = jax.tree.flatten(state)
    allowed = problem.allowed()
    constants = () if allowed is None else (allowed,)

    def function(x: Any, *arrays: Any) -> Any:
        restored = nnx.merge(graph, jax.tree.unflatten(tree, arrays[: len(leaves)]), rest)
        return restored(x, mask=arrays[-1] if constants else None, deterministic=True)

    return Call(function, (x, *map(np.asarray, leaves)), constants, "BLC")
