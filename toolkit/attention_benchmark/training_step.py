"""A training step of the layers, against those of the frameworks: `bench --operation train-step`.

A step computes the output, the sum of its squares, and the gradients of parameters and input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from attention_benchmark.steps import Pair, Step, StepsOrder

__all__ = ["pairs"]

SHAPE, HEADS, INNER = (32, 128, 512), 8, 2048


def pairs(order: StepsOrder) -> Iterator[Pair]:
    """The steps of a framework by layer: ours, and that of the framework."""
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    for name, both in {"torch": _torch, "jax": _jax, "tensorflow": _tensorflow}[order.library](x).items():
        if order.takes(name):
            yield Pair(name, *both)


def _torch(x: np.ndarray[Any, Any]) -> dict[str, tuple[Step, Step]]:
    import torch  # noqa: PLC0415 (one framework is imported in a process)

    import attention_torch  # noqa: PLC0415

    width = x.shape[-1]
    inputs = torch.from_numpy(x).requires_grad_()

    def step(module: Any, call: Callable[[Any], Any]) -> Step:
        def run() -> None:
            module.zero_grad()
            inputs.grad = None
            call(inputs).square().sum().backward()

        return run

    ours = attention_torch.MultiHeadAttention(width, HEADS)
    other = torch.nn.MultiheadAttention(width, HEADS, batch_first=True)
    encoder = attention_torch.EncoderLayer(width, HEADS, INNER, norm_first=False)
    encoder_other = torch.nn.TransformerEncoderLayer(
        width, HEADS, INNER, dropout=0.0, activation="gelu", batch_first=True
    )
    feed = attention_torch.FeedForward(width, INNER)
    feed_other = torch.nn.Sequential(torch.nn.Linear(width, INNER), torch.nn.GELU(), torch.nn.Linear(INNER, width))
    return {
        "MultiHeadAttention against torch.nn.MultiheadAttention": (
            step(ours, ours),
            step(other, lambda x: other(x, x, x, need_weights=False)[0]),
        ),
        "EncoderLayer against torch.nn.TransformerEncoderLayer": (
            step(encoder, encoder),
            step(encoder_other, encoder_other),
        ),
        "FeedForward against torch.nn.Sequential": (step(feed, feed), step(feed_other, feed_other)),
    }


def _jax(x: np.ndarray[Any, Any]) -> dict[str, tuple[Step, Step]]:
    import jax  # noqa: PLC0415
    from flax import nnx  # noqa: PLC0415

    import attention_jax  # noqa: PLC0415

    width = x.shape[-1]
    inputs = jax.numpy.asarray(x)

    def step(layer: Any, call: Callable[[Any, Any], Any]) -> Step:
        gradient = jax.jit(jax.grad(lambda layer, x: jax.numpy.sum(call(layer, x) ** 2), argnums=(0, 1)))
        return lambda: jax.block_until_ready(gradient(layer, inputs))

    graph, state = nnx.split(nnx.MultiHeadAttention(HEADS, width, decode=False, rngs=nnx.Rngs(0)))
    layers = {
        "MultiHeadAttention against flax.nnx.MultiHeadAttention": (
            attention_jax.MultiHeadAttention.init(0, width, HEADS),
            (state, lambda state, x: nnx.merge(graph, state)(x)),
        )
    }
    return {name: (step(ours, lambda layer, x: layer(x)), step(*other)) for name, (ours, other) in layers.items()}


def _tensorflow(x: np.ndarray[Any, Any]) -> dict[str, tuple[Step, Step]]:
    import keras  # noqa: PLC0415
    import tensorflow as tf  # noqa: PLC0415

    import attention_keras  # noqa: PLC0415

    width = x.shape[-1]
    inputs = tf.constant(x)

    def step(layer: Any, call: Callable[[Any], Any]) -> Step:
        call(inputs)  # makes the variables

        @tf.function  # type: ignore[untyped-decorator]
        def gradient() -> Any:
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                loss = tf.reduce_sum(tf.square(call(inputs)))
            return tape.gradient(loss, [*layer.trainable_variables, inputs])

        return lambda: [each.numpy() for each in gradient()]

    ours = attention_keras.MultiHeadAttention(width, HEADS)
    other = keras.layers.MultiHeadAttention(HEADS, width // HEADS)
    feed = attention_keras.FeedForward(width, INNER)
    feed_other = keras.Sequential([keras.layers.Dense(INNER, activation="gelu"), keras.layers.Dense(width)])
    return {
        "MultiHeadAttention against keras.layers.MultiHeadAttention": (
            step(ours, ours),
            step(other, lambda x: other(x, x)),
        ),
        "FeedForward against keras.Sequential": (step(feed, feed), step(feed_other, feed_other)),
    }
