"""Recorded models of frameworks: every call in order, its weights, and the same bits as without a record."""

import importlib

import numpy as np
import pytest

from attention_core.weights import record_attention
from attention_view.sources import as_numpy

X = np.random.default_rng(0).standard_normal((2, 5, 8)).astype("float32")
IDS = np.random.default_rng(1).integers(0, 61, size=(2, 5))


def of_torch():
    torch, layers = importlib.import_module("torch"), importlib.import_module("attention_torch")
    model = torch.nn.Sequential(*(layers.EncoderLayer(8, 2, 12, seed=seed) for seed in (0, 1))).eval()
    return lambda: model(torch.from_numpy(X)).detach().numpy()


def of_transformers():
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    importlib.import_module("attention_models.torch.transformers").register()
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=61, **sizes, attn_implementation="attention_core")
    model = transformers.BertModel(config).eval()
    return lambda: model(torch.from_numpy(IDS)).last_hidden_state.detach().numpy()


def of_nnx():
    nnx, layers = importlib.import_module("flax.nnx"), importlib.import_module("attention_jax.nnx")
    first, second = (layers.EncoderLayer(channels=8, num_heads=2, inner=12, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    first.eval()
    second.eval()
    return lambda: np.asarray(second(first(importlib.import_module("jax").numpy.asarray(X))))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(of_torch, marks=pytest.mark.needs("torch")),
        pytest.param(of_transformers, marks=pytest.mark.needs("torch", "transformers")),
        pytest.param(of_nnx, marks=pytest.mark.needs("jax", "flax")),
    ],
)
def test_a_recorded_model_computes_the_same_bits(make):
    run = make()
    run()  # which makes what is made at first
    expected = run()
    with record_attention() as records:
        found = run()
    assert found.tobytes() == expected.tobytes()
    assert [tuple(each.query.shape[:3]) for each in records] == [(2, 2, 5)] * 2
    for each in records:
        weights = as_numpy(each.weights(queries=[3]))
        assert weights.shape == (2, 2, 1, 5)
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
