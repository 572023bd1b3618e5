"""Draw docs/images/small-weights.svg, the errors of small weights in reproducible arithmetic, and print their table.

Scores are a gap and standard normal numbers. The truth is computed by mpmath, to 60 digits.
"""

import warnings
from pathlib import Path

import matplotlib as mpl
import mpmath
import numpy as np

from attention_core import Dropout, scaled_dot_product_attention
from attention_core._attention.reproducible import forward

mpl.use("svg")
import matplotlib.pyplot as plt

GAPS = range(0, 81, 2)
TABLE = (0, 10, 20, 30, 40, 60, 80)
LENGTH, SEED = 64, 3  # a seed whose dropout takes the largest weight
NORMAL = np.random.default_rng(0).standard_normal((2, LENGTH, 4)).astype(np.float32)


def zeroed(values):
    """Values of which the first key has none."""
    return np.concatenate([np.zeros_like(values[:1]), values[1:]])


CASES = {  # values, and a rate of dropout
    "unit vectors as values": (np.eye(LENGTH, dtype=np.float32), 0.0),
    "the largest weight has values of 0": (zeroed(NORMAL[0]), 0.0),
    "the largest weight has values of 1e-6": (zeroed(NORMAL[0]) + np.float32(1e-6), 0.0),
    "the largest weight is dropped": (NORMAL[0], 0.5),
    "ordinary values": (NORMAL[0], 0.0),
}


def errors(gap, values, rate, arithmetic):
    """The largest error of the outputs and of the weights, in ulps: of their scales, and of the weights themselves."""
    scores = NORMAL[1, :, 0].copy()
    scores[0] = gap
    one, key = np.ones((1, 1, 1), np.float32), scores[None, :, None]
    options = {"scale": 1.0, "arithmetic": arithmetic, "return_weights": True}
    found = scaled_dot_product_attention(one, key, values[None], dropout=Dropout(rate, SEED), **options)
    units = np.eye(LENGTH)[None]
    kept = scaled_dot_product_attention(*map(np.float64, (one, key, units)), scale=0.0, dropout=Dropout(rate, SEED))
    assert rate == 0 or kept[0, 0, 0] == 0
    powers = [mpmath.exp(mpmath.mpf(float(score))) for score in scores]
    total = mpmath.fsum(powers)
    factors = [power / total / (1 - rate) * bool(keep) for power, keep in zip(powers, kept[0, 0], strict=True)]
    outputs = []
    for output, column in zip(found.output[0, 0], values.T, strict=True):
        terms = [factor * mpmath.mpf(float(value)) for factor, value in zip(factors, column, strict=True)]
        outputs.append(in_ulps(output, mpmath.fsum(terms), mpmath.fsum(map(abs, terms))))
    weights = [in_ulps(w, power / total, power / total) for w, power in zip(found.weights[0, 0], powers, strict=True)]
    return max(outputs), max(weights)


def in_ulps(found, wanted, size):
    """An error in ulps of a size; 0 where the size is below float32's normal numbers."""
    if size < 2.0**-126:
        return 0.0
    return float(abs(mpmath.mpf(float(found)) - wanted) / mpmath.mpf(float(np.spacing(np.float32(size)))))


def without_refinement(*sums, weight):
    """The sums of two slices of each weight, in the place of those of as many as needed."""
    return sums[3], weight


def measure():
    """The errors of outputs by case and gap: of two slices alone, of reproducible arithmetic, of the fast one."""
    found = {name: {} for name in ("two slices", "reproducible", "fast")}
    for case, (values, rate) in CASES.items():
        for name, lines in found.items():
            refine = forward.refine
            forward.refine = without_refinement if name == "two slices" else refine
            arithmetic = "fast" if name == "fast" else "reproducible"
            lines[case] = [errors(gap, values, rate, arithmetic) for gap in GAPS]
            forward.refine = refine
    return found


def table(found):
    """The rows of docs/explanation/identical-bits.md."""
    print("| gap |", *(f"{gap} |" for gap in TABLE))
    print("|---|", *("---|" for _ in TABLE), sep="")
    lines = found["reproducible"]
    for case, line in lines.items():
        print(f"| {case} |", *(f"{line[gap // GAPS.step][0]:.2f} |" for gap in TABLE))
    worst = [max(line[gap // GAPS.step][1] for line in lines.values()) for gap in TABLE]
    print("| weights returned |", *(f"{error:.2f} |" for error in worst))


def draw(found):
    """Draw one line for each arithmetic: the largest error of all cases."""
    mpl.rcParams.update({"svg.hashsalt": "attention-core", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    colours = {"two slices": "#6e7781", "reproducible": "#1f6feb", "fast": "#c2410c"}
    for name, lines in found.items():
        worst = [max(line[place][0] for line in lines.values()) for place in range(len(GAPS))]
        axes.plot(GAPS, worst, color=colours[name], label=name)
    axes.set_yscale("log")
    axes.set_xlabel("gap between the largest score and the others")
    axes.set_ylabel("largest error, ulps of S")
    axes.grid(color="#d1d9e0", linewidth=0.8)
    axes.spines[:].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(Path(__file__).parent / "images" / "small-weights.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    warnings.simplefilter("error")
    results = measure()
    table(results)
    draw(results)
