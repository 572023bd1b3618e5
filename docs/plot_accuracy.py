"""Draw docs/images/error-length.svg, errors over the number of keys."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from torch.nn import functional

from attention_core import scaled_dot_product_attention

mpl.use("svg")
import matplotlib.pyplot as plt

IMAGES = Path(__file__).parent / "images"
LENGTHS = [2**n for n in range(4, 17)]
QUERIES, WIDTH = 16, 64


def ours(**options):
    return lambda *arrays: scaled_dot_product_attention(*arrays, **options)


def torch_kernel(*arrays):
    found = functional.scaled_dot_product_attention(*(torch.tensor(x)[None] for x in arrays))
    return found[0].numpy()


WAYS = {
    "attention-core, dense": (ours(implementation="dense"), "o-", "#1f6feb"),
    "attention-core, blockwise": (ours(implementation="blockwise"), "s-", "#0a7d5a"),
    "attention-core, reproducible": (ours(arithmetic="reproducible"), "D-", "#8250df"),
    "PyTorch's kernel": (torch_kernel, "^--", "#6e7781"),
}


def errors(length):
    """The largest error of each way in float32 ulps, against float64."""
    random = np.random.default_rng(length)
    query, key, value = (random.normal(size=(1, n, WIDTH)).astype(np.float32) for n in (QUERIES, length, length))
    value = np.abs(value)  # the output is the scale of its errors
    wide = [x.astype(np.float64) for x in (query, key, value)]
    exact = scaled_dot_product_attention(*wide)
    ulps = 2.0 ** (np.floor(np.log2(exact)) - 23)
    return [float(np.max(np.abs(way(query, key, value) - exact) / ulps)) for way, *_ in WAYS.values()]


def draw_errors():
    columns = np.array([errors(length) for length in LENGTHS]).T
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for (title, (_, marker, colour)), found in zip(WAYS.items(), columns, strict=True):
        axes.plot(LENGTHS, found, marker, color=colour, label=title, markersize=4, linewidth=1)
    axes.axhline(0.5, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("keys; 16 queries of width 64, standard normal numbers, and their magnitudes as values")
    axes.set_ylabel("largest error, float32 ulps")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(IMAGES / "error-length.svg", metadata={"Date": None}, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    mpl.rcParams.update({"svg.hashsalt": "attention-core", "svg.fonttype": "none", "font.size": 9})
    draw_errors()
