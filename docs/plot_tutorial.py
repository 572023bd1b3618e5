"""Draw docs/images/tutorial-*.svg, by running the code of docs/tutorial.md and drawing what it computes."""

import re
from pathlib import Path

import matplotlib as mpl
import numpy as np

from attention_core.weights import attention_weights

mpl.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def save(figure, name):
    figure.savefig(DOCS / "images" / f"{name}.svg", metadata={"Date": None})


def scale():
    """Weights of one query at three widths, without the scale and with it."""
    figure, axes = plt.subplots(2, 3, figsize=(8, 3.6), sharex=True, sharey=True, layout="constrained")
    for column, width in zip(axes.T, (4, 64, 1024), strict=True):
        query, key = np.random.default_rng(0).normal(size=(2, 1, 32, width))
        for axis, factor, name in zip(column, (1.0, width**-0.5), ("without the scale", "with the scale"), strict=True):
            axis.bar(range(32), attention_weights(query, key, scale=factor)[0, 0], color="#0072b2")
            axis.set_title(f"width {width}, {name}", fontsize=9)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("weight", fontsize=9)
    save(figure, "tutorial-scale")


def trained(names):
    """Weights of the layer of the page, before and after it was trained."""
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained")
    for axis, name, title in zip(axes, ("untrained", "weights"), ("before training", "after 100 steps"), strict=True):
        drawn = axis.imshow(names[name][0, 0].detach(), vmin=0, vmax=1)
        axis.set(title=title, xlabel="key", ylabel="query")
    figure.colorbar(drawn, ax=axes, label="weight", shrink=0.8)
    save(figure, "tutorial-trained")


def main():
    mpl.rcParams["svg.hashsalt"] = "attention-core"
    names = {}
    for block in BLOCK.findall((DOCS / "tutorial.md").read_text(encoding="utf-8")):
        exec(block, names)
    scale()
    trained(names)


if __name__ == "__main__":
    main()
