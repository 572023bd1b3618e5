"""Time a training step of the layers against those of the frameworks, as a table on standard output.

``python -m attention_benchmark.training_step`` runs each framework in a process of its own. A step computes the output,
the sum of its squares, and the gradients of parameters and input. Candidates take turns; the table has the median of
the ratios of a turn, with the quartiles.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from attention_benchmark.turns import Step, measured

__all__ = ["main", "steps"]

SHAPE, HEADS, INNER = (32, 128, 512), 8, 2048


def steps(framework: str) -> dict[str, tuple[Step, Step]]:
    """The steps of a framework by layer: ours, and that of the framework."""
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    return {"torch": _torch, "jax": _jax, "tensorflow": _tensorflow}[framework](x)


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


def main() -> None:
    """Print the table, or its rows for one framework."""
    if len(sys.argv) > 1:
        for name, pair in steps(sys.argv[1]).items():
            ours, (low, middle, high) = measured(*pair)
            print(f"| {name} | {ours:.0f} ms | {middle:.2f} ({low:.2f} to {high:.2f}) |", flush=True)
        return
    print("| layer | time of a step | ratio, with its quartiles |\n|---|---|---|", flush=True)
    for framework in ("torch", "jax", "tensorflow"):
        subprocess.run([sys.executable, "-m", __spec__.name, framework], check=True)


if __name__ == "__main__":
    main()
