"""Draw docs/images/speed.svg, the picture of the benchmark, and print its table of caches, from docs/measurements."""

import gzip
import json
import statistics
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
ROWS = (  # title, file, shape, mask
    ("1 × 1 × 8 × 16, no mask", "shapes", [1, 1, 8, 16], "full"),
    ("32 × 12 × 128 × 64, causal", "shapes", [32, 12, 128, 64], "causal"),
    ("1 × 8 × 2048 × 64, no mask", "shapes", [1, 8, 2048, 64], "full"),
    ("1 × 8 × 2048 × 64, causal", "shapes", [1, 8, 2048, 64], "causal"),
    ("8 × 8 × 2048 × 64, half of all keys padding", "padded", [8, 8, 2048, 64], "padded"),
    ("1 × 4 × 8192 × 64, documents of 512", "structure", [1, 4, 8192, 64], "packed"),
    ("1 × 4 × 8192 × 64, window of 256 keys", "structure", [1, 4, 8192, 64], "window"),
)
LIBRARIES = (  # backend, mode, title, marker, colour
    ("numpy", "eager", "NumPy (peer: the bare formula)", "D", "#6e7781"),
    ("torch", "eager", "PyTorch", "o", "#c2410c"),
    ("jax", "jit", "JAX, jitted", "s", "#1f6feb"),
    ("tensorflow", "graph", "TensorFlow, graph", "^", "#8250df"),
)
CACHES = (  # file, library, mode
    ("caches", "numpy", "eager"),
    ("caches", "torch", "eager"),
    ("caches_compiled", "torch", "compiled"),
    ("caches", "jax", "jit"),
    ("caches_tensorflow", "tensorflow", "graph"),
    ("caches_tensorflow", "tensorflow", "xla"),
)
TEXT, GRID = "#1f2328", "#d1d9e0"


def measured(name, backend, **problem):
    """The measurements of a file on one library, of some problems."""
    runs = json.loads(gzip.decompress((DOCS / "measurements" / f"{name}.json.gz").read_bytes()))["measurements"]
    runs = [run for run in runs if problem.items() <= run["problem"].items() and run["seconds"]]
    return [run for run in runs if run["candidate"]["framework"] == backend]


def is_auto(run, mode):
    return (run["candidate"]["name"], run["candidate"]["mode"]) == ("auto", mode)


def ratio(auto, runs):
    """The median over rounds of the time of ``auto``, divided by that of the fastest peer of the same problem."""
    peers = [run for run in runs if run["candidate"]["is_peer"] and run["problem"] == auto["problem"]]
    peer = min(peers, key=lambda run: statistics.median(run["seconds"]))
    return statistics.median(ours / theirs for ours, theirs in zip(auto["seconds"], peer["seconds"], strict=False))


def tell_caches():
    """Print a row for each library: the median of ratios by the number of queries, the smallest and the largest."""
    for name, backend, mode in CACHES:
        cells = []
        for queries in (1, 4, 16, 64, 512):
            runs = measured(name, backend, queries=queries)
            ratios = [ratio(run, runs) for run in runs if is_auto(run, mode)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        print(f"| {backend}, {mode} | {' | '.join(cells)} |")


def draw():
    """Draw one point for each library and call, on a logarithmic axis."""
    mpl.rcParams.update({"svg.hashsalt": "attention-core", "font.size": 10, "text.color": TEXT})
    figure, axes = plt.subplots(figsize=(8.8, 4), layout="constrained")
    for number, (backend, mode, title, marker, colour) in enumerate(LIBRARIES):
        ratios = []
        for _, name, shape, mask in ROWS:
            runs = measured(name, backend, shape=shape, mask=mask, direction="forward")
            ratios += [ratio(run, runs) for run in runs if is_auto(run, mode)]
        heights = [row + 0.15 * (number - 1.5) for row in range(len(ROWS))]  # apart, so that no mark hides another
        axes.plot(ratios, heights, marker, color=colour, label=title, markersize=7, linestyle="none")
    axes.axvline(1, color=TEXT, linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks([0.03, 0.1, 0.3, 1, 3, 10], ["0.03", "0.1", "0.3", "1", "3", "10"])
    axes.minorticks_off()
    axes.set_yticks(range(len(ROWS)), [row[0] for row in ROWS])
    axes.invert_yaxis()
    figure.supxlabel("time of a forward call / time of the fastest peer on the same library", fontsize=10)
    axes.tick_params(colors=TEXT, length=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.patch.set_visible(False)
    axes.spines[:].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, labelcolor=TEXT, handletextpad=0.2)
    figure.savefig(DOCS / "images" / "speed.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    draw()
    tell_caches()
