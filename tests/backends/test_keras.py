"""Layers of Keras on each library: loaded and saved, masked, trained, configured, with the same seeds and bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DROPPED = "501b71d3023a56b0"
SAVED = "f01f24b8f50621ba"
# So the variables of TensorFlow and PyTorch answer when Keras asks NumPy for them.
IGNORED = "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"

pytestmark = pytest.mark.needs("keras")


def checked(what, library, saved, *others):
    command = [sys.executable, "-W", "error", "-W", IGNORED, str(HERE.parent / "helpers" / "keras_check.py")]
    ran = subprocess.run(
        [*command, what, str(saved), *map(str, others)],
        env=os.environ | {"KERAS_BACKEND": library, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert (found["saved"], found["others"]) == (SAVED, [SAVED] * len(others))
    return found


LIBRARIES = [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("tensorflow", "jax", "torch")]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_model_of_keras_is_the_same_on_every_library(library, tmp_path):
    assert checked("layers", library, tmp_path / "model.keras")["dropped"] == DROPPED


@pytest.mark.needs("tensorflow")
@pytest.mark.needs("jax")
@pytest.mark.needs("torch")
def test_a_model_saved_on_one_library_loads_on_the_next(tmp_path):
    saved = [tmp_path / f"{library}.keras" for library in ("torch", "jax", "tensorflow")]
    for index, path in enumerate(saved):
        checked("files", path.stem, path, *saved[max(0, index - 1) : index])
