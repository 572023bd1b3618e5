"""Train one small model on PyTorch, JAX and TensorFlow: the same first weights, the same batches, the same losses.

The images are the 1,797 handwritten digits of 8 × 8 pixels in scikit-learn. ``encoder`` reads the rows of an image as a
sequence of 8 tokens; ``sagan`` is a convolutional net with self-attention over its feature maps. Linear layers,
convolutions, losses and optimizers are the framework's own. The layers of attention are those of attention_torch,
attention_jax and attention_keras, with the same seed::

    python examples/digits.py --plot digits.svg
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("JAX_ENABLE_X64", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from sklearn.datasets import load_digits

from attention_core import initializers
from attention_core.backend import get_backend

FRAMEWORKS = ("torch", "jax", "tensorflow")
MODELS = ("encoder", "sagan")
CHANNELS, HEADS, INNER = 32, 4, 64
STEPS, BATCH = 200, 64
RATE, MOMENTUM = 3 / 128, 7 / 8  # float32 holds both exactly, and Keras keeps them in it
TEST = 297  # images that no training sees


class Run(NamedTuple):
    """The result of a training."""

    losses: np.ndarray
    accuracy: float
    parameters: dict[str, np.ndarray]


def images(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The images in [0, 1], (1797, 8, 8), and their digits, in an order from a seed."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return (digits.images[order] / 16).astype(dtype), digits.target[order].astype(np.int32)


def batches(count: int) -> list[np.ndarray]:
    """The images of every step."""
    rng = np.random.default_rng(1)
    return [rng.choice(count, BATCH, replace=False) for _ in range(STEPS)]


def first_weights(model: str, dtype: str) -> dict[str, np.ndarray]:
    """The weights around the layers of attention; convolutions as (height, width, in, out)."""
    backend = get_backend("numpy")
    shapes: dict[str, tuple[int, ...]] = {"head.weight": (CHANNELS if model == "encoder" else 64 * CHANNELS, 10)}
    if model == "encoder":
        shapes |= {"stem.weight": (8, CHANNELS), "position": (8, CHANNELS)}
    else:
        shapes |= {"stem.weight": (3, 3, 1, CHANNELS), "conv.weight": (3, 3, CHANNELS, CHANNELS)}
    weights = {}
    for seed, (name, dims) in enumerate(sorted(shapes.items())):
        flat = (int(np.prod(dims[:-1])), dims[-1])
        weights[name] = initializers.glorot_uniform(seed, flat, dtype=dtype, xp=backend.namespace).reshape(dims)
    biases = {
        name.replace("weight", "bias"): np.zeros(dims[-1], dtype) for name, dims in shapes.items() if name != "position"
    }
    return weights | biases


def train_torch(model: str, dtype: str) -> Run:
    """Train with `torch.nn` and `torch.optim`."""
    import torch

    import attention_torch

    kind, start = getattr(torch, dtype), first_weights(model, dtype)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if model == "encoder":
                self.stem = torch.nn.Linear(8, CHANNELS, dtype=kind)
                self.position = torch.nn.Parameter(torch.empty(8, CHANNELS, dtype=kind))
                self.first, self.second = (
                    attention_torch.EncoderLayer(CHANNELS, HEADS, INNER, seed=seed, dtype=kind) for seed in (1, 2)
                )
            else:
                self.stem = torch.nn.Conv2d(1, CHANNELS, 3, padding=1, dtype=kind)
                self.conv = torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, dtype=kind)
                self.first = attention_torch.SaganAttention(CHANNELS, data_format="channels_first", seed=1, dtype=kind)
            self.head = torch.nn.Linear(len(start["head.weight"]), 10, dtype=kind)
            weights = {
                name: torch.from_numpy(
                    value if value.ndim < 2 or name == "position" else np.moveaxis(value, (-1, -2), (0, 1)).copy()
                )
                for name, value in start.items()
            }
            self.load_state_dict(weights, strict=False)

        def forward(self, x: Any) -> Any:
            if model == "encoder":
                h = self.second(self.first(self.stem(x) + self.position)).mean(-2)
            else:
                h = torch.relu(self.stem(x[:, None]))
                h = torch.relu(self.conv(self.first(h))).movedim(1, -1).flatten(1)
            return self.head(h)

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    x, y = (torch.from_numpy(array) for array in images(dtype))
    losses = []
    for index in batches(len(x) - TEST):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x[index]), y[index].long())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    net.eval()
    found = net(x[-TEST:]).argmax(-1)
    parameters = {name: tensor.detach().numpy() for name, tensor in net.state_dict().items()}
    return Run(np.asarray(losses), float((found == y[-TEST:]).double().mean()), parameters)


def train_jax(model: str, dtype: str) -> Run:
    """Train a pytree with a step that is compiled once."""
    import jax
    import jax.numpy as jnp

    import attention_jax

    weights: dict[str, Any] = {name: jnp.asarray(value) for name, value in first_weights(model, dtype).items()}
    if model == "encoder":
        weights |= {
            name: attention_jax.EncoderLayer.init(seed, CHANNELS, HEADS, INNER, dtype=dtype)
            for name, seed in (("first", 1), ("second", 2))
        }
    else:
        weights["first"] = attention_jax.SaganAttention.init(1, CHANNELS, dtype=dtype)

    def convolved(x: Any, name: str, weights: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x, weights[f"{name}.weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.relu(y + weights[f"{name}.bias"])

    def apply(weights: Any, x: Any) -> Any:
        if model == "encoder":
            h = x @ weights["stem.weight"] + weights["stem.bias"] + weights["position"]
            h = weights["second"](weights["first"](h)).mean(-2)
        else:
            h = weights["first"](convolved(x[..., None], "stem", weights))
            h = convolved(h, "conv", weights).reshape(len(x), -1)
        return h @ weights["head.weight"] + weights["head.bias"]

    def measure(weights: Any, x: Any, y: Any) -> Any:
        chosen = jnp.take_along_axis(jax.nn.log_softmax(apply(weights, x)), y[:, None], axis=-1)
        return -chosen.mean()

    @jax.jit
    def step(weights: Any, velocity: Any, x: Any, y: Any) -> Any:
        loss, gradient = jax.value_and_grad(measure)(weights, x, y)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
        advanced = weights | {"first": weights["first"].refreshed()}  # the state has no gradient
        return jax.tree.map(lambda w, v: w - RATE * v, advanced, velocity), velocity, loss

    x, y = images(dtype)
    velocity = jax.tree.map(jnp.zeros_like, weights)
    losses = []
    for index in batches(len(x) - TEST):
        weights, velocity, loss = step(weights, velocity, x[index], y[index])
        losses.append(float(loss))
    found = np.asarray(apply(weights, jnp.asarray(x[-TEST:]))).argmax(-1)
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    parameters = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return Run(np.asarray(losses), float((found == y[-TEST:]).mean()), parameters)


def train_tensorflow(model: str, dtype: str) -> Run:
    """Train a functional model of Keras with its own optimizer."""
    import keras
    import tensorflow as tf

    import attention_keras

    start = first_weights(model, dtype)

    class Position(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.position = self.add_weight(
                shape=(8, CHANNELS), name="position", initializer=_constant(start["position"])
            )

        def call(self, x: Any) -> Any:
            return x + self.position

    def _constant(value: np.ndarray) -> Callable[..., Any]:
        return lambda shape, dtype: tf.constant(value, dtype)

    def made(kind: Any, name: str, *settings: Any, **named: Any) -> Any:
        initial = {
            f"{part}_initializer": _constant(start[f"{name}.{last}"])
            for part, last in (("kernel", "weight"), ("bias", "bias"))
        }
        return kind(*settings, **named, **initial, dtype=dtype)

    x = keras.Input((8, 8), dtype=dtype)
    if model == "encoder":
        h = Position(dtype=dtype)(made(keras.layers.Dense, "stem", CHANNELS)(x))
        for seed in (1, 2):
            h = attention_keras.EncoderLayer(CHANNELS, HEADS, INNER, seed=seed, dtype=dtype)(h)
        h = keras.ops.mean(h, -2)
    else:
        options = {"padding": "same", "activation": "relu"}
        h = made(keras.layers.Conv2D, "stem", CHANNELS, 3, **options)(keras.ops.expand_dims(x, -1))
        h = attention_keras.SaganAttention(CHANNELS, seed=1, dtype=dtype)(h)
        h = keras.layers.Flatten(dtype=dtype)(made(keras.layers.Conv2D, "conv", CHANNELS, 3, **options)(h))
    net = keras.Model(x, made(keras.layers.Dense, "head", 10)(h))
    optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    optimizer.build(net.trainable_variables)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = net(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True)
        )
        return loss

    images_, digits = images(dtype)
    losses = [float(step(images_[index], digits[index])) for index in batches(len(images_) - TEST)]
    found = np.asarray(net(images_[-TEST:])).argmax(-1)
    parameters = {variable.path: np.asarray(variable) for variable in net.variables}
    return Run(np.asarray(losses), float((found == digits[-TEST:]).mean()), parameters)


TRAIN = {"torch": train_torch, "jax": train_jax, "tensorflow": train_tensorflow}


def plot(runs: dict[str, dict[str, Run]], path: str) -> None:
    """Draw the losses of all frameworks, and how far they are from those of the first."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "attention-core"  # the same names in the file each time
    figure, axes = plt.subplots(2, len(runs), figsize=(11, 6), sharex=True, squeeze=False, layout="constrained")
    styles = {
        "torch": {"lw": 5, "alpha": 0.35},
        "jax": {"lw": 2.2, "ls": "--"},
        "tensorflow": {"lw": 1, "color": "black"},
    }
    for column, (model, found) in enumerate(runs.items()):
        above, below = axes[:, column]
        first = found["torch"].losses
        for framework, run in found.items():
            above.plot(run.losses, label=f"{framework}: {run.accuracy:.1%} of unseen images right", **styles[framework])
            if framework != "torch":
                apart = np.abs(run.losses / first - 1)
                below.semilogy(np.where(apart, apart, np.nan), ".", label=f"{framework} against torch")
        above.set(title=model, ylabel="loss", yscale="log")
        below.set(xlabel="step", ylabel="relative difference of losses")
        above.legend()
        below.legend()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main() -> None:
    """Train all, print the results, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--plot", help="draw the losses into this file (needs matplotlib)")
    arguments = parser.parse_args()
    runs = {model: {name: TRAIN[name](model, arguments.dtype) for name in FRAMEWORKS} for model in MODELS}
    for model, found in runs.items():
        first = found["torch"].losses
        for name, run in found.items():
            apart = np.max(np.abs(run.losses / first - 1))
            print(
                f"{model:8s} {name:11s} loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}  "
                f"accuracy {run.accuracy:.1%}  furthest from torch {apart:.1e}"
            )
    if arguments.plot:
        plot(runs, arguments.plot)


if __name__ == "__main__":
    main()
