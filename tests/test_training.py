"""One training on three frameworks: the example that ships with the project, held to what it claims."""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

REQUIRED = os.environ.get("ATTENTION_CORE_PEERS") == "1"


def need(*names):
    """Libraries of the example: required where ATTENTION_CORE_PEERS asks for them."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            if REQUIRED:
                raise ImportError(f"the comparison of trainings needs {name}")
            pytest.skip(f"{name} is not installed")


@pytest.fixture(scope="module")
def digits():
    need("sklearn", "torch", "jax", "keras")
    path = Path(__file__).parents[1] / "examples" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits", path)
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


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float64", 1e-10)])
@pytest.mark.parametrize("model", ["encoder", "sagan"])
def test_a_training_is_the_same_on_three_frameworks(model, dtype, tolerance, digits, one_thread):
    """Its losses agree at every one of 200 steps, and what was learned is right for 95 % of unseen images."""
    runs = {name: digits.TRAIN[name](model, dtype) for name in digits.FRAMEWORKS}
    first = runs["torch"].losses
    assert first.shape == (200,)
    assert first[0] > 2
    assert first[-1] < 0.2
    for name, run in runs.items():
        np.testing.assert_allclose(run.losses, first, rtol=tolerance, err_msg=name)
        assert run.accuracy > 0.95
        assert sum(array.size for array in run.parameters.values()) > 10_000


@pytest.mark.parametrize("model", ["encoder", "sagan"])
def test_losses_are_drawn(model, digits, tmp_path):
    need("matplotlib")
    losses = np.geomspace(2.0, 0.1, 200)
    runs = {name: digits.Run(losses * (1 + 1e-7 * index), 0.97, {}) for index, name in enumerate(digits.FRAMEWORKS)}
    digits.plot({model: runs}, str(tmp_path / "losses.svg"))
    assert (tmp_path / "losses.svg").stat().st_size > 10_000
