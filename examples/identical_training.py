"""Train on PyTorch, JAX and TensorFlow, eager or compiled, and end with the same parameters, bit for bit.

``encoder`` and ``sagan`` learn the handwritten digits of scikit-learn, with layers in reproducible arithmetic and the
optimizer of each framework. No step to a parameter depends on the order of a library:

* a row of pixels, or a patch of them, comes with its position, so no position is added;
* the loss of an image is one logsumexp of the scores :math:`z_j - z_y`, so its gradient is one exact operation;
* the mean over a batch of 16 divides by a power of two;
* the rate is a power of two, which leaves an update one rounding, whether compiled into one instruction or not.

The command prints the SHA-256 of the parameters for every framework and mode, and the first number that differs::

    python examples/identical_training.py
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from sklearn.datasets import load_digits

from attention_conformance.golden.identical import compare, digest
from attention_core import scaled_dot_product_attention
from attention_core.backend import get_backend
from attention_core.layers import EncoderLayer, FeedForward, SaganAttention, named_arrays
from attention_core.random import random_bits

STEPS, BATCH = 60, 16
RATES = {"encoder": 1 / 32, "sagan": 1 / 4}
TEST = 297  # images that no training sees
EXACT = {"arithmetic": "reproducible"}
MODELS = {
    "encoder": (
        FeedForward(16, 64, output_channels=32, **EXACT),
        EncoderLayer(32, 4, 64, **EXACT),
        FeedForward(8 * 32, 64, output_channels=10, **EXACT),
    ),
    "sagan": (
        FeedForward(20, 64, output_channels=32, **EXACT),
        SaganAttention(32, **EXACT),
        FeedForward(16 * 32, 64, output_channels=10, **EXACT),
    ),
}
"""The layers: the last one gets the channels of all positions of an image."""


class Run(NamedTuple):
    """The result of a training."""

    accuracy: float
    parameters: tuple[tuple[str, np.ndarray], ...]


def first_layers(model: str) -> list[tuple[Any, Any, Any]]:
    """Definitions with the parameters and the state that they start from."""
    xp = get_backend("numpy").namespace
    return [
        (each, each.init(seed, xp=xp), each.init_state(seed, xp=xp)) for seed, each in enumerate(MODELS[model], start=1)
    ]


def images(model: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows of 8 pixels (1797, 8, 16), or patches of 4 (1797, 4, 4, 20), with unit vectors of positions; the digits."""
    digits = load_digits()
    order = np.argsort(random_bits(0, digits.target.shape, xp=get_backend("numpy").namespace))
    pixels = (digits.images[order] / 16).astype(np.float32)
    if model == "sagan":
        pixels = pixels.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 4, 4, 4)
    places = pixels.shape[1:-1]
    units = np.eye(int(np.prod(places)), dtype=np.float32).reshape(*places, -1)
    placed = np.concatenate([pixels, np.broadcast_to(units, (len(pixels), *units.shape))], axis=-1)
    return placed, digits.target[order]


def batches(model: str, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For every step images (16, ...), and for their digits y the vectors (16, 10, 10) of the scores z_j - z_y."""
    x, y = images(model)
    units = np.eye(10, dtype=np.float32)
    indices = [(BATCH * step + np.arange(BATCH)) % (len(x) - TEST) for step in range(steps)]
    return [(x[index], units - units[y[index], None]) for index in indices]


def losses(logits: Any, apart: Any) -> Any:
    """The cross-entropy of every image, log Σ exp(z_j - z_y): (16, 10), (16, 10, 10) -> (16, 1)."""
    found = scaled_dot_product_attention(logits[:, None], apart, apart, scale=1.0, return_logsumexp=True, **EXACT)
    return found.logsumexp


def run(model: str, logits: np.ndarray, layers: Any) -> Run:
    """Compare with the digits of the test images, and read the arrays of the layers."""
    held = [
        named_arrays(tree, f"{index}.{part}")
        for index, layer in enumerate(layers)
        for part, tree in zip(("parameters", "state"), layer.to_numpy(), strict=True)
    ]
    arrays = tuple(item for each in held for item in each.items())
    return Run(float((logits.argmax(-1) == images(model)[1][-TEST:]).mean()), arrays)


def train_torch(model: str, mode: str, steps: int = STEPS) -> Run:
    """Train a sequence of modules with `torch.optim.SGD`."""
    import torch

    import attention_torch

    *body, head = (attention_torch.Layer.from_numpy(*each) for each in first_layers(model))
    net = torch.nn.Sequential(*body, torch.nn.Flatten(), head)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATES[model])

    def measure(x: Any, apart: Any) -> Any:
        return losses(net(x), apart).mean()

    if mode == "compiled":
        measure = torch.compile(measure, fullgraph=True)
    for x, apart in batches(model, steps):
        optimizer.zero_grad()
        measure(torch.from_numpy(x), torch.from_numpy(apart)).backward()
        optimizer.step()
    with torch.no_grad():
        logits = net.eval()(torch.from_numpy(images(model)[0][-TEST:]))
    return run(model, logits.numpy(), [*body, head])


def train_jax(model: str, mode: str, steps: int = STEPS) -> Run:
    """Train a list of pytrees by plain gradient descent."""
    import jax

    import attention_jax

    layers = [attention_jax.Layer.from_numpy(*each) for each in first_layers(model)]

    def apply(layers: Any, x: Any) -> Any:
        *body, head = layers
        for layer in body:
            x = layer(x)
        return head(x.reshape(len(x), -1))

    def step(layers: Any, x: Any, apart: Any) -> Any:
        gradient = jax.grad(lambda layers: losses(apply(layers, x), apart).mean())(layers)
        advanced = [layer.refreshed() for layer in layers]  # the state has no gradient
        return jax.tree.map(lambda w, g: w - RATES[model] * g, advanced, gradient)

    if mode == "jit":
        step, apply = jax.jit(step), jax.jit(apply)
    for x, apart in batches(model, steps):
        layers = step(layers, *jax.device_put((x, apart)))
    return run(model, np.asarray(apply(layers, jax.device_put(images(model)[0][-TEST:]))), layers)


def train_tensorflow(model: str, mode: str, steps: int = STEPS) -> Run:
    """Train a sequential model of Keras with its own optimizer."""
    import keras
    import tensorflow as tf

    import attention_keras

    *body, head = (attention_keras.Layer.from_numpy(*each) for each in first_layers(model))
    net = keras.Sequential([*body, keras.layers.Flatten(), head])
    optimizer = keras.optimizers.SGD(RATES[model])
    net.build((BATCH, *images(model)[0].shape[1:]))
    optimizer.build(net.trainable_variables)

    def step(x: Any, apart: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(net(x, training=True), apart))
        optimizer.apply(tape.gradient(loss, net.trainable_variables))

    apply = net
    if mode != "eager":
        step, apply = (tf.function(each, jit_compile=mode == "xla") for each in (step, net))
    for x, apart in batches(model, steps):
        step(tf.constant(x), tf.constant(apart))
    return run(model, apply(tf.constant(images(model)[0][-TEST:])).numpy(), [*body, head])


TRAIN = {"torch": train_torch, "jax": train_jax, "tensorflow": train_tensorflow}
MODES = {"torch": ("eager", "compiled"), "jax": ("jit", "eager"), "tensorflow": ("graph", "eager", "xla")}
"""Of every framework, beginning with what it is mostly used in."""


def main() -> None:
    """Train on each framework and mode, print the hashes of the parameters; end with status 1 unless they agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--model", action="append", choices=MODELS, help="repeatable; by default both")
    parser.add_argument("--framework", action="append", choices=TRAIN, help="repeatable; by default all")
    parser.add_argument("--every-mode", action="store_true", help="and not only the first of each framework")
    arguments = parser.parse_args()
    frameworks = arguments.framework or TRAIN
    ways = [(name, mode) for name in frameworks for mode in MODES[name][: None if arguments.every_mode else 1]]
    differing = 0
    for model in arguments.model or MODELS:
        first = None
        for framework, mode in ways:
            started = time.perf_counter()
            found = TRAIN[framework](model, mode, arguments.steps)
            seconds = time.perf_counter() - started
            first = first or found
            print(
                f"{model:8s}{framework:11s}{mode:9s}accuracy {found.accuracy:.1%}  {seconds:4.0f} s  "
                f"SHA-256 {digest(found.parameters)}",
                flush=True,
            )
            if digest(found.parameters) != digest(first.parameters):
                print(f"  {compare(found.parameters, first.parameters)} before", flush=True)
                differing += 1
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
