"""Backends and functions of which their tests ask."""

import os
import subprocess
import sys
import textwrap
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


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
