"""A training step of the layers, against those of the frameworks: ``python -m timed_steps train-step``.

A step computes the output, the sum of its squares, and the gradients of parameters and input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from timed_steps import Order, Pair, Step

SHAPE, HEADS, INNER = (32, 128, 512), 8, 2048


def pairs(order: Order) -> Iterator[Pair]:
    """The steps of a framework by layer: ours, and that of the framework."""
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    for name, both in {"torch": _torch, "tensorflow": _tensorflow}[order.library](x).items():
        if order.takes(name):
            yield Pair(name, *both)


def _torch(x: np.ndarray[Any, Any]) -> dict[str, tuple[Step, Step]]:
    import torch  # noqa: PLC0415 (one framework is imported in a process)

    import attention_torch  # noqa: PLC0415

    width = x.shape[-1]
    inputs = torch.from_numpy(x).requires_grad_()

    def step(module: Any) -> Step:
        def run() -> None:
            module.zero_grad()
            inputs.grad = None
            module(inputs).square().sum().backward()

        return run

    encoder = attention_torch.EncoderLayer(width, HEADS, INNER, norm_first=False)
    encoder_other = torch.nn.TransformerEncoderLayer(
        width, HEADS, INNER, dropout=0.0, activation="gelu", batch_first=True
    )
    feed = attention_torch.FeedForward(width, INNER)
    feed_other = torch.nn.Sequential(torch.nn.Linear(width, INNER), torch.nn.GELU(), torch.nn.Linear(INNER, width))
    return {
        "EncoderLayer against torch.nn.TransformerEncoderLayer": (
            step(encoder),
            step(encoder_other),
        ),
        "FeedForward against torch.nn.Sequential": (step(feed), step(feed_other)),
    }


def _tensorflow(x: np.ndarray[Any, Any]) -> dict[str, tuple[Step, Step]]:
    import keras  # noqa: PLC0415
    import tensorflow as tf  # noqa: PLC0415

    import attention_keras  # noqa: PLC0415

    width = x.shape[-1]
    inputs = tf.constant(x)

    def step(layer: Any) -> Step:
        layer(inputs)  # makes the variables

        @tf.function  # type: ignore[untyped-decorator]
        def gradient() -> Any:
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                loss = tf.reduce_sum(tf.square(layer(inputs)))
            return tape.gradient(loss, [*layer.trainable_variables, inputs])

        return lambda: [each.numpy() for each in gradient()]

    feed = attention_keras.FeedForward(width, INNER)
    feed_other = keras.Sequential([keras.layers.Dense(INNER, activation="gelu"), keras.layers.Dense(width)])
    return {"FeedForward against keras.Sequential": (step(feed), step(feed_other))}
