"""Rotary embedding, against the operator of ONNX."""

import importlib

import numpy as np
import pytest

from attention_core.functions import rotary_embedding


def tables(positions, base, width):
    """Cosine and sine of all angles."""
    angles = np.asarray(positions)[:, None] * base ** (-2 * np.arange(width // 2) / width)
    return np.cos(angles), np.sin(angles)


@pytest.mark.needs("onnx")
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_operator_of_onnx(interleaved, backend, rng):
    onnx = importlib.import_module("onnx")
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator
    x, positions = rng.standard_normal((2, 3, 5, 10)).astype(np.float32), rng.integers(0, 50, (2, 5))
    cos, sin = (table.astype(np.float32) for table in tables(range(50), 10000.0, 8))
    names = ["x", "cos", "sin", "positions"]
    node = onnx.helper.make_node("RotaryEmbedding", names, ["y"], interleaved=int(interleaved), rotary_embedding_dim=8)
    (expected,) = evaluator(node).run(None, dict(zip(names, (x, cos, sin, positions), strict=True)))
    result = rotary_embedding(*backend.from_numpy((x, positions)), width=8, interleaved=interleaved)
    np.testing.assert_allclose(backend.to_numpy(result), expected, rtol=0, atol=1e-6)
