"""Draw docs/images/small-weights.svg, the errors of small weights in reproducible arithmetic, and print their table.

Scores are a gap and standard normal numbers. The truth is computed by mpmath, to 60 digits. Gradients are those of
PyTorch.
"""

import warnings
from pathlib import Path

import matplotlib as mpl
import mpmath
import numpy as np
import torch
from ml_dtypes import bfloat16

from attention_core import Dropout, scaled_dot_product_attention

mpl.use("svg")
import matplotlib.pyplot as plt

GAPS = range(0, 81, 2)
DIGITS = {np.float32: 23, np.float16: 10, bfloat16: 7}
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


def errors(gap, values, rate, arithmetic, dtype=np.float32):
    """The largest error of the outputs and of the weights, in ulps: of their scales, and of the weights themselves."""
    scores, values = NORMAL[1, :, 0].astype(dtype), values.astype(dtype)
    scores[0] = gap
    one, key = np.ones((1, 1, 1), dtype), scores[None, :, None]
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
        outputs.append(in_ulps(output, mpmath.fsum(terms), mpmath.fsum(map(abs, terms)), digits=DIGITS[dtype]))
    weights = [
        in_ulps(w, power / total, power / total, digits=DIGITS[dtype])
        for w, power in zip(found.weights[0, 0], powers, strict=True)
    ]
    return max(outputs), max(weights)


def in_ulps(found, wanted, size, digits=23):
    """An error in ulps of a size; 0 where the size is below the normal numbers."""
    if size < (2.0**-14 if digits == 10 else 2.0**-126):
        return 0.0
    _, exponent = mpmath.frexp(size)
    return float(abs(mpmath.mpf(float(found)) - wanted) / mpmath.mpf(2) ** (exponent - 1 - digits))


def measure():
    """The errors of outputs by arithmetic, case and gap."""
    return {
        arithmetic: {case: [errors(gap, *inputs, arithmetic) for gap in GAPS] for case, inputs in CASES.items()}
        for arithmetic in ("reproducible", "fast")
    }


def table(found):
    """The rows of docs/explanation/identical-bits.md."""
    print("| gap |", *(f"{gap} |" for gap in TABLE))
    print("|---|", *("---|" for _ in TABLE), sep="")
    lines = found["reproducible"]
    for case, line in lines.items():
        print(f"| {case} |", *(f"{line[gap // GAPS.step][0]:.2g} |" for gap in TABLE))
    worst = [max(line[gap // GAPS.step][1] for line in lines.values()) for gap in TABLE]
    print("| weights returned |", *(f"{error:.2g} |" for error in worst))
    for dtype in (np.float16, bfloat16):
        worst = [max(errors(gap, *case, "reproducible", dtype)[0] for case in CASES.values()) for gap in TABLE]
        print(f"| outputs, {np.dtype(dtype)} |", *(f"{error:.2g} |" for error in worst))


def gradient_errors(gap, dtype):
    """The largest errors of the gradients of one query: of query, keys, values and bias, in ulps of their scales.

    Take dP = dO v and s = p (|dP| + sum p |dP|). The scales are then sum s |k|, s |q|, p |dO| and s.
    """
    rng = np.random.default_rng(1)
    query, key, value, d_output = (rng.standard_normal((1, n, 2)).astype(np.float32) for n in (1, 6, 6, 1))
    query, key[0, 0] = np.abs(query), gap / 2 / np.abs(query[0, 0])
    inputs = [torch.tensor(x).to(dtype).requires_grad_() for x in (query, key, value, np.zeros((1, 6)))]
    d_output = torch.tensor(d_output).to(dtype)
    *qkv, bias = inputs
    scaled_dot_product_attention(*qkv, bias=bias, scale=1.0, arithmetic="reproducible").backward(d_output)
    q, k, v, d = ([[mpmath.mpf(number) for number in row] for row in x[0].tolist()] for x in (*qkv, d_output))
    powers = [mpmath.exp(mpmath.fdot(q[0], row)) for row in k]
    p = [power / mpmath.fsum(powers) for power in powers]
    d_weights = [mpmath.fdot(d[0], row) for row in v]
    delta, size = mpmath.fdot(p, d_weights), mpmath.fdot(p, map(abs, d_weights))
    d_scores = [weight * (of_weight - delta) for weight, of_weight in zip(p, d_weights, strict=True)]
    sizes = [weight * (abs(of_weight) + size) for weight, of_weight in zip(p, d_weights, strict=True)]
    of_query, of_keys, of_values, of_bias = (x.grad.tolist()[0] for x in inputs)
    digits = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[dtype]
    found = {"query": [], "keys": [], "values": [], "bias": []}
    for e in range(2):
        column = [row[e] for row in k]
        terms = mpmath.fdot(d_scores, column), mpmath.fdot(sizes, map(abs, column))
        found["query"].append(in_ulps(of_query[0][e], *terms, digits=digits))
    for j, weight in enumerate(p):
        found["bias"].append(in_ulps(of_bias[j], d_scores[j], sizes[j], digits=digits))
        for e in range(2):
            found["keys"].append(in_ulps(of_keys[j][e], d_scores[j] * q[0][e], sizes[j] * q[0][e], digits=digits))
            found["values"].append(in_ulps(of_values[j][e], weight * d[0][e], weight * abs(d[0][e]), digits=digits))
    return {name: max(errors) for name, errors in found.items()}


def gradient_table():
    """The rows of gradients."""
    print("| gap |", *(f"{gap} |" for gap in TABLE))
    print("|---|", *("---|" for _ in TABLE), sep="")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        errors_of = [gradient_errors(gap, dtype) for gap in TABLE]
        for name in errors_of[0]:
            title = f"{name}, {str(dtype).removeprefix('torch.')}"
            print(f"| {title} |", *(f"{found[name]:,.2g} |" for found in errors_of))


def draw(found):
    """Draw one line for each arithmetic: the largest error of all cases."""
    mpl.rcParams.update({"svg.hashsalt": "attention-core", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    colours = {"reproducible": "#1f6feb", "fast": "#c2410c"}
    for name, lines in found.items():
        worst = [max(line[number][0] for line in lines.values()) for number in range(len(GAPS))]
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
    gradient_table()
    draw(results)
