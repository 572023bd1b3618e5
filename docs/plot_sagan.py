"""Draw docs/images/sagan.png from docs/weights/sagan.safetensors, which `python examples/sagan.py FILE` trains."""

import importlib.util
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from attention_files.safetensors import load_tree

DOCS = Path(__file__).parent
POINTS = {"petal": (45, 75), "leaf": (80, 30), "background": (12, 110)}


def example():
    """The module of the example."""
    spec = importlib.util.spec_from_file_location("sagan", DOCS.parent / "examples" / "sagan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    mpl.use("Agg")
    sagan = example()
    tree, _ = load_tree(DOCS / "weights" / "sagan.safetensors")
    inputs, pixels = sagan.scene(), sagan.photograph()
    height, width = inputs.shape[1:3]
    queries = [row * width + column for row, column in POINTS.values()]
    weights = sagan.maps(tree, inputs).weights(queries=queries)[0, 0]
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.2), layout="constrained")
    axes[0, 0].imshow(pixels)
    for axis, found, (name, (row, column)) in zip(axes.flat[1:], weights, POINTS.items(), strict=True):
        axis.imshow(pixels.mean(-1), cmap="gray", alpha=0.35)
        keys = found.reshape(height // 2, width // 2)  # a pooled key is a block of 4 × 4 pixels
        drawn = axis.imshow(keys, extent=(-0.5, 2 * width - 0.5, 2 * height - 0.5, -0.5), cmap="magma", alpha=0.85)
        figure.colorbar(drawn, ax=axis, shrink=0.8)
        axis.set_title(f"Weights of a place on the {name}")
        for each in (axis, axes[0, 0]):
            each.plot(2 * column, 2 * row, "o", color="white", markeredgecolor="#d00000", markeredgewidth=2)
        axes[0, 0].annotate(name, (2 * column + 6, 2 * row), color="white")
    axes[0, 0].set_title("The photograph, and three queries")
    for axis in axes.flat:
        axis.set_axis_off()
    figure.savefig(DOCS / "images" / "sagan.png", dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    main()
