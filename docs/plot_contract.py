"""Draw docs/images/contract-*.svg: what the lines of the contract mean here, and what other libraries compute.

Every map is computed when it is drawn. Values that are unit vectors make the output of any attention its weights.
"""

import os
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import flax.linen
import jax
import keras
import matplotlib as mpl
import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from attention_core import Causal, KeyLengths, Segments, SlidingWindow, scaled_dot_product_attention

mpl.use("svg")
import matplotlib.pyplot as plt

IMAGES = Path(__file__).parent / "images"
NAN = "#b3261e"
RANDOM = np.random.default_rng(0)


# Attentions of NumPy arrays (heads, length, width), with a mask that is True where a query may attend


def ours(query, key, value, **options):
    return scaled_dot_product_attention(query, key, value, **options)


def torch_function(query, key, value, mask=None, **options):
    arrays = (torch.tensor(x)[None] for x in (query, key, value))
    mask = None if mask is None else torch.asarray(mask)
    return functional.scaled_dot_product_attention(*arrays, attn_mask=mask, **options)[0].numpy()


def torch_module(query, key, value, ignored, need_weights=True):
    """`torch.nn.MultiheadAttention` of one head, whose projections are identities; its mask is True to ignore."""
    width = query.shape[-1]
    layer = torch.nn.MultiheadAttention(width, 1, bias=False, batch_first=True).eval()
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.eye(width).repeat(3, 1))
        layer.out_proj.weight.copy_(torch.eye(width))
        arrays = (torch.tensor(x) for x in (query, key, value))
        return layer(*arrays, attn_mask=torch.asarray(ignored), need_weights=need_weights)[0].numpy()


def length_first(function, **names):
    """An attention of JAX or Keras, whose heads stand behind the positions."""

    def attention(query, key, value, **options):
        arrays = (np.swapaxes(x, 0, 1)[None] for x in (query, key, value))
        options = {names.get(name, name): option for name, option in options.items()}
        if "mask" in options:
            options["mask"] = options["mask"][None, None]
        return np.swapaxes(np.asarray(function(*arrays, **options))[0], 0, 1)

    return attention


jax_function = length_first(jax.nn.dot_product_attention)
keras_function = length_first(keras.ops.dot_product_attention)
flax_function = length_first(flax.linen.dot_product_attention)


# Pictures


def inputs(queries, keys, heads=1, width=None):
    """Query and key of random numbers, and unit vectors as values: (heads, length, width)."""
    width = keys if width is None else width
    query, key = (RANDOM.normal(size=(heads, n, width)).astype(np.float32) for n in (queries, keys))
    return query, key, np.broadcast_to(np.eye(keys, dtype=np.float32), (heads, keys, keys))


def attempt(function, *arrays, **options):
    """What a function returns, or the class of its error."""
    try:
        return np.asarray(function(*arrays, **options))[0]
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__


def show(axes, title, found, numbers):
    """Draw a matrix, with its numbers or without; NaN is red, and an error a word."""
    axes.set_title(title, fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])
    if isinstance(found, str):
        axes.text(0.5, 0.5, found, ha="center", va="center", transform=axes.transAxes, color=NAN)
        return
    colours = mpl.colormaps["Blues"].with_extremes(bad=NAN)
    axes.imshow(np.ma.masked_invalid(found), cmap=colours, vmin=0, vmax=1)
    for (row, column), number in np.ndenumerate(found if numbers else np.empty((0, 0))):
        colour = "white" if np.isnan(number) or number > 0.5 else "black"
        word = "NaN" if np.isnan(number) else f"{number:.2f}"
        axes.text(column, row, word, ha="center", va="center", fontsize=7, color=colour)


def draw(name, panels, about, *, height=2.0, numbers=True):
    """Write maps with their titles, three or four to a row, above a sentence."""
    columns = min(len(panels), 4) if len(panels) < 5 else 3
    rows = -(-len(panels) // columns)
    size = 1.9 * columns, height * rows
    figure, all_axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axes in all_axes.flat:
        axes.axis("off")
    for axes, (title, found) in zip(all_axes.flat, panels.items(), strict=False):
        axes.axis("on")
        show(axes, title, found, numbers)
    figure.supxlabel(about, fontsize=9)
    save(figure, name)


def save(figure, name):
    figure.savefig(IMAGES / f"contract-{name}.svg", metadata={"Date": None}, facecolor="white")
    plt.close(figure)


# The lines


def mask():
    arrays, lower = inputs(3, 3), np.tri(3, dtype=bool)
    panels = {
        "attention-core": attempt(ours, *arrays, mask=lower),
        "PyTorch, function": attempt(torch_function, *arrays, mask=lower),
        "PyTorch, module": attempt(torch_module, *arrays, ignored=lower),
        "JAX": attempt(jax_function, *arrays, mask=lower),
        "Keras": attempt(keras_function, *arrays, mask=lower),
    }
    draw("mask", panels, "weights of 3 queries, where the same mask is True on and below the diagonal")


def rules():
    positions = 12
    segments = np.repeat([0, 1, 2], [3, 4, 5])
    masks = {
        "Causal()": Causal(),
        "SlidingWindow(left=3, right=0)": SlidingWindow(left=3, right=0),
        "KeyLengths(8)": KeyLengths(8),
        "Segments(ids, ids)": Segments(segments, segments),
        "Causal() & Segments(…)": Causal() & Segments(segments, segments),
    }
    zeros, units = np.zeros((1, positions, 1)), np.eye(positions)[None]
    panels = {title: ours(zeros, zeros, units, mask=mask)[0] > 0 for title, mask in masks.items()}
    draw(
        "rules", panels, "12 queries, from above, and the keys that they may attend to, dark", height=2.2, numbers=False
    )


def causal():
    arrays = inputs(2, 4)
    lower_right = causal_lower_right(2, 4)
    query, key, value = (torch.tensor(x)[None] for x in arrays)
    panels = {
        "attention-core": attempt(ours, *arrays, is_causal=True),
        "Causal(offset=2)": attempt(ours, *arrays, mask=Causal(offset=2)),
        "PyTorch": attempt(torch_function, *arrays, is_causal=True),
        "causal_lower_right": functional.scaled_dot_product_attention(query, key, value, lower_right)[0, 0].numpy(),
        "JAX": attempt(jax_function, *arrays, is_causal=True),
        "Keras": attempt(keras_function, *arrays, is_causal=True),
    }
    draw("causal", panels, "weights of 2 queries and 4 keys", height=1.5)


def fully_masked_row():
    arrays, allowed = inputs(3, 3), np.tri(3, dtype=bool)
    allowed[1] = False
    panels = {
        "attention-core": attempt(ours, *arrays, mask=allowed),
        "PyTorch, function": attempt(torch_function, *arrays, mask=allowed),
        "PyTorch, module": attempt(torch_module, *arrays, ignored=~allowed),
        "JAX": attempt(jax_function, *arrays, mask=allowed),
        "Keras": attempt(keras_function, *arrays, mask=allowed),
        "Flax": attempt(flax_function, *arrays, mask=allowed),
    }
    draw("fully-masked-row", panels, "weights of 3 queries, of which the second may attend to no key")


def masked_nan():
    query, key, value = inputs(3, 3)
    value = np.array([[[0.2, 0.4], [0.6, 0.8], [np.nan, np.nan]]], np.float32)
    allowed = np.array([[True, True, False]] * 3)
    panels = {
        "attention-core": attempt(ours, query, key, value, mask=allowed),
        "PyTorch": attempt(torch_function, query, key, value, mask=allowed),
        "JAX": attempt(jax_function, query, key, np.pad(value, ((0, 0), (0, 0), (0, 1))), mask=allowed)[..., :2],
        "Keras": attempt(keras_function, query, key, np.pad(value, ((0, 0), (0, 0), (0, 1))), mask=allowed)[..., :2],
    }
    draw("masked-nan", panels, "outputs of 3 queries, where a masked value is NaN", height=2.2)


if __name__ == "__main__":
    mpl.rcParams.update({"svg.hashsalt": "attention-core", "svg.fonttype": "none", "font.size": 9})
    for picture in (mask, rules, causal, fully_masked_row, masked_nan):
        picture()
