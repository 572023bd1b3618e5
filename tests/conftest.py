"""One fixture runs every law on every backend.

``ATTENTION_CORE_BACKENDS`` names backends, separated by commas: those are required, and an absent one is an error,
never a skip. Without it, the laws run on whatever is installed.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_ENABLE_X64", "1")  # the laws are stated in float64 too
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from attention_core import available_backends, get_backend

ASKED = [name for name in os.environ.get("ATTENTION_CORE_BACKENDS", "").split(",") if name]

settings.register_profile(
    "laws",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("laws")


@pytest.fixture(params=ASKED or available_backends(), scope="session")
def backend(request):
    return get_backend(request.param)


@pytest.fixture(scope="session")
def xp(backend):
    return backend.namespace


@pytest.fixture
def rng():
    return np.random.default_rng(20240229)


@pytest.fixture(scope="session")
def put(backend):
    """NumPy arrays to the backend's."""
    return backend.from_numpy


@pytest.fixture(scope="session")
def get(backend):
    """The backend's arrays to NumPy's."""
    return backend.to_numpy


def pytest_report_header():
    return f"backends: {', '.join(ASKED or available_backends())}"
