"""One training on three frameworks: the example that ships with the project, held to what it claims."""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attention_core.layers import EncoderLayer, FeedForward, SaganAttention, named_arrays

REQUIRED = os.environ.get("ATTENTION_CORE_PEERS") == "1"
EXACT = {"arithmetic": "reproducible"}
SMALL = {  # programs of half as many layers, for the inputs of the example
    "encoder": (EncoderLayer(16, 2, 8, **EXACT), FeedForward(8 * 16, 8, output_channels=10, **EXACT)),
    "sagan": (SaganAttention(20, **EXACT), FeedForward(16 * 20, 8, output_channels=10, **EXACT)),
}
WAYS = [  # each framework and each model, compiled; for TensorFlow, SAGAN attention takes long to trace
    ("sagan", "jax", "jit"),
    ("sagan", "torch", "compiled"),
    ("encoder", "tensorflow", "graph"),
    pytest.param("encoder", "tensorflow", "xla", marks=pytest.mark.optimized),  # XLA takes minutes after all others
]


def need(*names):
    """Libraries of the example: required where ATTENTION_CORE_PEERS asks for them."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            if REQUIRED:
                raise ImportError(f"the comparison of trainings needs {name}")
            pytest.skip(f"{name} is not installed")


@pytest.fixture
def identical():
    """The example as a module of its own, that a test may change."""
    need("sklearn", "torch", "jax", "keras")
    path = Path(__file__).parents[2] / "examples" / "identical_training.py"
    spec = importlib.util.spec_from_file_location("identical_training", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def one_thread():
    """Nets this small are trained sooner by one thread than by several that wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def hashes(identical, model, ways, steps):
    return {way: identical.digest(identical.TRAIN[way[0]](model, way[1], steps).parameters) for way in ways}


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
@pytest.mark.parametrize(("model", "framework", "mode"), WAYS)
def test_a_training_in_reproducible_arithmetic_ends_in_the_same_bits(model, framework, mode, identical, one_thread):
    identical.MODELS, identical.TEST = identical.MODELS if mode == "xla" else SMALL, identical.BATCH
    assert len(set(hashes(identical, model, [("torch", "eager"), (framework, mode)], 2).values())) == 1


def test_a_training_in_fast_arithmetic_does_not(identical, monkeypatch):
    """So the inputs are such that the order of a sum shows."""
    fast = {name: tuple(replace(each, arithmetic="fast") for each in net) for name, net in identical.MODELS.items()}
    monkeypatch.setattr(identical, "MODELS", fast)
    monkeypatch.setattr(identical, "EXACT", {"arithmetic": "fast"})
    assert len(set(hashes(identical, "encoder", [("torch", "eager"), ("jax", "jit")], 3).values())) == 2


@pytest.mark.parametrize(
    ("model", "framework"), [pytest.param("encoder", "jax", marks=pytest.mark.optimized), ("sagan", "torch")]
)
def test_a_reproducible_training_moves_every_parameter_learns_and_ends_as_documented(
    model, framework, identical, one_thread
):
    before = [named_arrays(parameters) for _, parameters, _ in identical.first_layers(model)]
    run = identical.TRAIN[framework](model, identical.MODES[framework][0])
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "identical-bits.md").read_text(encoding="utf-8")
    assert f"| {model} | {100 * run.accuracy:.1f} % | `{identical.digest(run.parameters)[:16]}` |" in page
    assert run.accuracy > 0.75
    after = dict(run.parameters)
    for index, arrays in enumerate(before):
        for name, array in arrays.items():
            assert not np.array_equal(array, after[f"{index}.parameters.{name}"]), name
