"""One fixture runs every test on every backend, and a marker says which backends a test is about.

``ATTENTION_CORE_BACKENDS`` names backends, separated by commas: those are required, and an absent one is an error,
never a skip. Without it, the tests run on whatever is installed.

``@pytest.mark.needs(...)`` names what a test needs. Where that is not so, the test is deselected. A need is one of

* a library to compare with, such as ``"transformers"``: required where ``ATTENTION_CORE_PEERS`` is 1, else installed;
* a backend, such as ``"torch"``: the one that the test runs on, or one at hand if the test takes no ``backend``;
* a fact of ``FACTS``, or a type such as ``"bfloat16"``, of the backend that the test runs on;
* the name of a parameter, which stands for its value;
* a function of parameters, by their names.

Tests in a folder named like a backend need that backend.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import os
import sys
import threading
from pathlib import Path

os.environ.setdefault("JAX_ENABLE_X64", "1")  # tests are stated in float64 too
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from attention_core._attention import memo
from attention_core.backend import available_backends, get_backend

ASKED = [name for name in os.environ.get("ATTENTION_CORE_BACKENDS", "").split(",") if name]
BACKENDS = ASKED or available_backends()
KNOWN = {"array_api_strict", "numpy", "torch", "jax", "tensorflow"}
DTYPES = {"float16", "bfloat16", "float32", "float64"}
PEERS = {"dask", "equinox", "flax", "keras", "ndonnx", "onnx", "transformers"}
FACTS = {
    "gradients": lambda backend: backend.differentiates,
    "compilation": lambda backend: len(backend.modes) > 1,
    "xla": lambda backend: "xla" in backend.modes,
    "untraced loops": lambda backend: not backend.loops.traced,
    "fused softmax": lambda backend: backend.loops.softmax is not None,
    **{name: lambda backend, name=name: name in backend.dtypes for name in DTYPES},
}

collect_ignore = [f"backends/{name}" for name in KNOWN.difference(BACKENDS)]

settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],  # on a machine under load
)
settings.load_profile("tests")


def pytest_collection_modifyitems(config, items):
    """Deselect the tests whose needs are not met."""
    left_out = [item for item in items if not (all(map(is_met_for(item), needs_of(item))) and is_at_home(item))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def is_at_home(item):
    """Whether this is the place for a test: one of no backend runs where NumPy does, and not once more elsewhere."""
    return "numpy" in BACKENDS or "backend" in item.fixturenames or bool(needs_of(item))


def needs_of(item):
    """The needs that markers name, and the backend after which a folder is named."""
    named = [need for marker in item.iter_markers("needs") for need in marker.args]
    return [*named, *KNOWN.intersection([item.path.parent.name])]


def is_met_for(item):
    """Whether a need of a test is met, as a function."""
    values = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    on = values.get("backend")
    if on is not None:
        values["backend"] = get_backend(on)

    def is_met(need):
        if callable(need):
            return need(**{name: values[name] for name in inspect.signature(need).parameters})
        need = values.get(need, need)
        if need in PEERS:
            return os.environ.get("ATTENTION_CORE_PEERS") == "1" or importlib.util.find_spec(need) is not None
        if need in KNOWN:
            return need == on if on is not None else need in BACKENDS
        return FACTS[need](values["backend"])

    return is_met


def pytest_collection_finish():
    """Collect garbage less often, and not through modules and tests: tracing a program makes many objects."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def one_context():
    """Let JAX lower its programs in one context for each thread, not in one for each program, as making that takes long."""
    mlir = importlib.import_module("jax._src.interpreters.mlir") if "jax" in sys.modules else None
    if hasattr(mlir, "make_ir_context"):
        of_thread = functools.cache(lambda _, make=mlir.make_ir_context: make())
        mlir.make_ir_context = lambda: of_thread(threading.get_ident())


MOST_MAPS = 30_000  # of memory; Linux grants a process 65,530, and JAX, which needs some for each program, then crashes
TESTS_RUN = pytest.StashKey[int]()


def pytest_runtest_teardown(item):
    """Let JAX forget its programs before there are too many. They are counted after every eighth test."""
    count = item.session.stash[TESTS_RUN] = item.session.stash.get(TESTS_RUN, 0) + 1
    maps = Path("/proc/self/maps")
    if count % 8 == 0 and "jax" in sys.modules and maps.exists() and maps.read_text().count("\n") > MOST_MAPS:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture(params=BACKENDS, scope="session")
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


@pytest.fixture
def remembered(monkeypatch):
    """Whether each call was computed by what was known of its signature, in order."""
    found = []

    def output(known, *arguments, **options):
        result = memo.output_of(known, *arguments, **options)
        found.append(result is not None)
        return result

    monkeypatch.setattr("attention_core._functions.attention.output_of", output)
    return found


def pytest_report_header():
    return f"backends: {', '.join(BACKENDS)}"
