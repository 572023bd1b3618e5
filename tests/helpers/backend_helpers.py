"""Backends and functions of which their tests ask."""

import importlib
import io
import os
import subprocess
import sys
import textwrap
import zipfile
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest


class Pair(NamedTuple):
    first: Any
    second: Any = None


def run(script: str, **environment: str) -> str:
    """What a script prints in a fresh interpreter; the test fails with its errors where it fails."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def floats(*numbers: float, dtype: str = "float32") -> np.ndarray:
    return np.asarray(numbers, dtype=np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype))


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert isinstance(actual, np.ndarray)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()


def assert_same_tree(found: Any, expected: Any) -> None:
    """Equal in structure, type, dtype, shape and bits."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list | tuple):
        for branch, wanted in zip(found, expected, strict=True):
            assert_same_tree(branch, wanted)
    elif expected is not None:
        assert_same_bits(found, expected)


def imported(name):
    """A fixture that is a module."""
    return pytest.fixture(scope="module")(lambda: importlib.import_module(name))


def close(got, expected, ulps=16):
    """Fail unless errors are within so many units of the largest finite number that is expected."""
    scale = max(1.0, float(np.max(np.abs(expected), initial=0, where=np.isfinite(expected))))
    np.testing.assert_allclose(got, expected, rtol=0, atol=ulps * scale * np.finfo(got.dtype).eps)


def peer(name):
    """A library to compare with: required where ATTENTION_CORE_PEERS asks for it."""
    return importlib.import_module(name) if os.environ.get("ATTENTION_CORE_PEERS") == "1" else pytest.importorskip(name)


def archive(name):
    """The bytes of a zip archive with one empty file."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as zipped:
        zipped.writestr(name, b"")
    return data.getvalue()
