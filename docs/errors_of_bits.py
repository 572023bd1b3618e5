"""Print the tables of errors in docs/explanation/identical-bits.md: ``python docs/errors_of_bits.py``, on a CPU.

Errors are the largest ones, in units in the last place of the sum of the sizes of terms, against long double. Results
below 2^-126 are left out.
"""

from __future__ import annotations

import numpy as np
import torch

from attention_core import scaled_dot_product_attention

HEADS, ROWS, KEYS, WIDTH = 4, 128, 1024, 64


def draw_case(kind: str, gap: float, draw: np.random.Generator) -> list[np.ndarray]:
    """Query, key and value in float32."""
    query, key, value = (draw.standard_normal((HEADS, length, WIDTH)) for length in (ROWS, KEYS, KEYS))
    if kind == "queries times 3":
        query *= 3
    elif kind == "values of t(1.5)":
        value = draw.standard_t(1.5, value.shape)
    elif kind == "channels from 1 to 2^20":
        value *= np.exp2(np.linspace(0, 20, WIDTH))
    elif kind != "normal":  # one key whose score is larger by the gap
        query[..., 0], key[..., 0] = 8, 0
        key[:, 0] = 0
        key[:, 0, 0] = gap
        if kind == "unit vectors":
            value = np.broadcast_to(np.eye(KEYS)[:, :WIDTH], value.shape)
        else:
            value[:, 0] = 0
    return [x.astype(np.float32) for x in (query, key, value)]


def truths(query, key, value, factor):
    """Output and gradients, each with the sum of sizes of its terms."""
    query, key, value, factor = (x.astype(np.longdouble) for x in (query, key, value, factor))
    scores = query @ key.swapaxes(-1, -2) / 8
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights, output = factor @ value.swapaxes(-1, -2), weights @ value
    delta = (factor * output).sum(-1, keepdims=True)
    d_scores = weights * (d_weights - delta) / 8
    sizes = np.abs(factor) @ np.abs(value).swapaxes(-1, -2) + np.abs(factor * output).sum(-1, keepdims=True)
    sizes *= weights / 8
    pairs = ((weights, value), (d_scores, key), (d_scores.swapaxes(-1, -2), query), (weights.swapaxes(-1, -2), factor))
    of_sizes = (weights, sizes, sizes.swapaxes(-1, -2), weights.swapaxes(-1, -2))
    return [(x @ y, size @ np.abs(y)) for (x, y), size in zip(pairs, of_sizes, strict=True)]


def formula(query, key, value):
    """The definition in float32."""
    weights = torch.softmax(query @ key.swapaxes(-1, -2) / 8, -1)
    return weights @ value


def exactly(*arrays):
    return scaled_dot_product_attention(*arrays, arithmetic="reproducible")


CASES = [("normal", 0), ("queries times 3", 0), ("values of t(1.5)", 0), ("channels from 1 to 2^20", 0)]
CASES += [(kind, gap) for kind in ("unit vectors", "sink of zeros") for gap in (10, 40, 80)]

if __name__ == "__main__":
    ways = {"formula": formula, "kernel": torch.nn.functional.scaled_dot_product_attention, "reproducible": exactly}
    for kind, gap in CASES:
        draw = np.random.default_rng(0)
        arrays, factor = draw_case(kind, gap, draw), draw.standard_normal((HEADS, ROWS, WIDTH)).astype(np.float32)
        wanted = truths(*arrays, factor)
        print(f"| {kind}{f', gap {gap}' if gap else ''}")
        for name, way in ways.items():
            tensors = [torch.from_numpy(x)[None].requires_grad_() for x in arrays]
            output = way(*tensors)
            output.backward(torch.from_numpy(factor)[None])
            found = [x.detach().numpy()[0] for x in (output, *(tensor.grad for tensor in tensors))]
            errors = []
            for x, (truth, size) in zip(found, wanted, strict=True):
                ulp = np.exp2(np.maximum(np.frexp(size.astype(np.float64))[1], -125) - 24.0)
                errors.append(float(np.max(np.where(np.abs(truth) < 2.0**-126, 0, np.abs(x - truth)) / ulp)))
            print(f"  {name}: " + " | ".join(f"{error:.2g}" for error in errors))
