"""Rotary embedding and buckets of relative positions, against the operator of ONNX and models of transformers."""

import importlib

import numpy as np
import pytest

from attention_core._functions.rotary import rotary_embedding
from attention_core.scores import relative_bias


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


@pytest.mark.needs("torch", "transformers")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("buckets", "max_distance"),
    [(32, 128), (32, 64), (32, 20), (64, 256), (16, 128), (32, 1000), (12, 50), (8, 7), (4, 8)],
)
def test_buckets_are_those_of_transformers(buckets, max_distance, bidirectional):
    torch = importlib.import_module("torch")
    t5 = importlib.import_module("transformers.models.t5.modeling_t5").T5Attention
    distance = torch.arange(-max_distance - 3, max_distance + 4)
    expected = t5._relative_position_bucket(distance, bidirectional, buckets, max_distance)
    table = torch.arange(buckets, dtype=torch.float32)[:, None]
    mod = relative_bias(table, bidirectional=bidirectional, max_distance=max_distance, offset=max_distance + 3)
    at = (torch.zeros((), dtype=torch.int32),) * 2 + (torch.zeros((1, 1), dtype=torch.int32),)
    scores = torch.zeros((1, len(distance)))
    result = mod(scores, *at, torch.arange(len(distance), dtype=torch.int32))
    assert result[0].int().tolist() == expected.tolist()
