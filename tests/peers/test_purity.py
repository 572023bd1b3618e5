"""The core knows no library: it runs on ones that it never heard of, lazily, strictly, and exported.

``ATTENTION_CORE_PEERS=1`` makes dask, ndonnx and onnxruntime required; without it, their absence skips their tests.
"""

import importlib
import inspect
import pathlib
import re
import shutil
import subprocess
import sys

import array_api_strict
import numpy as np
import pytest
from tracing_helpers import CASES, QKV, leaves, normal

import attention_core
import attention_core as ac
from attention_core import initializers
from attention_core.backend import get_backend
from attention_numpy.trees import map_arrays

CORE = pathlib.Path(attention_core.__file__).parent
PUBLIC = ("masks", "parameters", "random", "initializers", "backend", "layers")
PUBLIC += ("cache", "functions", "pieces", "scores", "weights")
# float64 results of other orders of summation, relative to the largest element.
CLOSE = 1e-14


def assert_same(actual, expected):
    """Equal in dtype and, but for the order of summation, in values."""
    actual, expected = leaves(actual), leaves(expected)
    assert len(actual) == len(expected) > 0
    for result, wanted in zip(actual, expected, strict=True):
        assert result.dtype == wanted.dtype
        finite = np.abs(wanted[np.isfinite(wanted)])
        largest = finite.max() if finite.size else 0.0
        np.testing.assert_allclose(result, wanted, rtol=0, atol=CLOSE * largest)


# --- lazy: dask ---


def chunked(arrays, chunks):
    """Arrays in chunks of two along every axis, or those of three axes and more alone, as inputs are."""
    array = importlib.import_module("dask.array")
    return [array.from_array(x, chunks=2 if chunks == "all" or x.ndim > 2 else -1) for x in arrays]


def refuse_to_compute(*arguments, **options):
    raise AssertionError("a lazy array was computed")


@pytest.mark.needs("dask")
@pytest.mark.parametrize("chunks", ["inputs", "all"])
@pytest.mark.parametrize("name", CASES)
def test_dask_arrays_stay_lazy(name, chunks):
    dask = importlib.import_module("dask")
    function, arrays = CASES[name]
    with dask.config.set(scheduler=refuse_to_compute):
        lazy = function(*chunked(arrays, chunks))
    computed = map_arrays(lambda array: array.compute(scheduler="synchronous"), lazy)
    assert_same(computed, function(*arrays))


def selected(dims, axis):
    """A dask array whose length along one axis nobody knows."""
    array = importlib.import_module("dask.array")
    keep = array.from_array(np.arange(dims[axis]) != 1)
    return array.compress(keep, array.from_array(normal(*dims)), axis=axis)


@pytest.mark.needs("dask")
def test_dask_batches_of_unknown_size():
    arrays = [selected((3, 2, 5, 4), 0)] * 3
    known = [np.asarray(each.compute(scheduler="synchronous")) for each in arrays]
    assert_same(
        ac.scaled_dot_product_attention(*arrays).compute(scheduler="synchronous"),
        ac.scaled_dot_product_attention(*known),
    )


UNKNOWN = {
    "length": (ac.scaled_dot_product_attention, 2),
    "causal": (lambda q, k, v: ac.scaled_dot_product_attention(q, k, v, is_causal=True), 2),
    "split_heads": (lambda q, k, v: ac.split_heads(q, 2), 2),
    "merge_heads": (lambda q, k, v: ac.merge_heads(q), 0),
}


@pytest.mark.needs("dask")
@pytest.mark.parametrize("name", UNKNOWN)
def test_dask_dimensions_that_cannot_be_known_are_an_error(name):
    function, axis = UNKNOWN[name]
    arrays = [selected((3, 2, 5, 4), axis)] * 3
    with pytest.raises(ValueError):
        function(*arrays)


# --- exported: ndonnx ---


def exported(function, arrays, dims=None):
    """Trace a function of trees, and run the exported graph in onnxruntime.

    ``dims`` gives shapes for the leaves in order, with names for the dimensions that are left open.
    """
    ndonnx, runtime = importlib.import_module("ndonnx"), importlib.import_module("onnxruntime")
    spox = importlib.import_module("spox._future")
    values = leaves(arrays)
    shapes = [array.shape for array in values] if dims is None else dims
    traced = {
        f"x{number}": ndonnx.argument(shape=shape, dtype=getattr(ndonnx, str(array.dtype)))
        for number, (array, shape) in enumerate(zip(values, shapes, strict=True))
    }
    arguments = iter(traced.values())
    with spox.value_prop_backend(spox.ValuePropBackend.REFERENCE):  # else a session of onnxruntime for each node
        result = function(*map_arrays(lambda leaf: next(arguments), tuple(arrays)))
    results = {f"y{number}": leaf for number, leaf in enumerate(leaves(result))}
    model = ndonnx.build(traced, results).SerializeToString()
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    used = {each.name for each in session.get_inputs()}
    inputs = {name: array for name, array in zip(traced, values, strict=True) if name in used}
    return dict(zip(results, session.run(None, inputs), strict=True)).values()


# ndonnx takes only by int64, where the standard allows every integer type, and has cosines of float32. With dropout a layer
# has thousands of nodes, for which dropout of the weights alone stands here, as parts do for what combines them.
NOT_EXPORTED = {"segments of samples", "embed", "encoder", "everything", "array and rule", "rotary"}
NOT_EXPORTED |= {"partial"}  # of which one part is what roundings leave
# The shapes of options, where batch and lengths are open.
OPEN = {
    "causal": [],
    "length": [],
    "window": [],
    "softcap": [],
    "bias of hmn": [(6, "M", "N")],
    "array": [("B", 6, "M", "N")],
    "lengths": [("B",)],
    "offsets": [("B",)],
}


@pytest.mark.needs("ndonnx")
@pytest.mark.parametrize("name", ["causal", *sorted(set(CASES) - NOT_EXPORTED - set(OPEN))])
def test_ndonnx_export_runs_in_onnxruntime(name):
    function, arrays = CASES[name]
    assert_same(tuple(exported(function, arrays)), function(*arrays))


@pytest.mark.needs("ndonnx")
@pytest.mark.parametrize("name", OPEN)
def test_ndonnx_export_with_open_batch_and_lengths(name):
    function, arrays = CASES[name]
    dims = [("B", 6, "M", 4), ("B", 3, "N", 4), ("B", 3, "N", 3), *OPEN[name]]
    assert_same(tuple(exported(function, arrays, dims)), function(*arrays))


@pytest.mark.needs("ndonnx")
def test_ndonnx_export_of_float32():
    arrays = tuple(array.astype(np.float32) for array in QKV)
    (actual,) = exported(ac.scaled_dot_product_attention, arrays)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, ac.scaled_dot_product_attention(*arrays), rtol=0, atol=1e-6)


# --- strict: the standard and nothing more ---


@pytest.fixture
def strict():
    """The standard without what it leaves optional: no boolean indexing, no shapes out of data, no extensions."""
    with array_api_strict.ArrayAPIStrictFlags(
        boolean_indexing=False, data_dependent_shapes=False, enabled_extensions=()
    ):
        yield get_backend("array_api_strict")


@pytest.mark.parametrize("device", ["CPU_DEVICE", "device1"])
@pytest.mark.parametrize("name", sorted(set(CASES) - {"array and rule"}))  # whose array leaves no operator to rules
def test_the_bare_standard_is_enough_on_every_device(name, device, strict):
    function, arrays = CASES[name]
    result = function(*strict.from_numpy(arrays, device=device))
    assert all(device in str(leaf.device) for leaf in leaves(result))
    assert_same(strict.to_numpy(result), function(*arrays))


@pytest.mark.parametrize("name", ["uniform", "normal", "truncated_normal", "glorot_uniform"])
def test_initial_parameters_are_made_on_the_device_asked_for(name, strict):
    (device,) = (each for each in array_api_strict.__array_namespace_info__().devices() if "device1" in str(each))
    made = getattr(initializers, name)(3, (4, 5), xp=strict.namespace, device=device)
    assert made.device == device
    np.testing.assert_array_equal(
        strict.to_numpy(made), getattr(initializers, name)(3, (4, 5), xp=get_backend("numpy").namespace)
    )


# --- what is imported ---


IMPORTED = """
import importlib, pkgutil, sys
before = set(sys.modules)
import attention_core
assert sum(name.partition(".")[0] == "attention_core" for name in sys.modules) <= 60
for module in pkgutil.walk_packages(attention_core.__path__, "attention_core."):
    importlib.import_module(module.name)
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""


@pytest.mark.needs("dask", "ndonnx")
def test_the_core_imports_the_standard_library_and_array_api_compat_alone():
    """All of its modules do, of array-api-compat the root alone, which imports no library. A call needs few of them."""
    run = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert set(run.stdout.split()) - sys.stdlib_module_names == {"attention_core", "array_api_compat"}


@pytest.mark.needs("torch")
def test_a_copy_under_another_name_is_a_core_of_its_own(tmp_path):
    copy, readme = "vendored.attention_core_copy", CORE.parent / "README.md"
    shutil.copytree(CORE, tmp_path.joinpath(*copy.split(".")))
    blocks = re.findall(r"^```python\n(.*?)^```$", readme.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    asked = "from attention_core.masks._rules import is_of_users\nassert not is_of_users(Causal)\n"
    program = "".join((*blocks[:2], asked)).replace("attention_core", copy)  # on NumPy, and on PyTorch
    program += "import sys\nassert not [name for name in sys.modules if name.startswith('attention_')]"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


# --- what is public ---


def test_the_top_level_names_are_those_announced():
    visible = {
        name for name, value in vars(attention_core).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert visible == set(attention_core.__all__)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "backend"])  # which gathers from all rooms
def test_a_public_module_announces_what_it_defines(name):
    module = importlib.import_module(f"attention_core.{name}")
    defined = {
        each
        for each, value in vars(module).items()
        if f"{getattr(value, '__module__', None)}.".startswith(f"{module.__name__}.") and not each.startswith("_")
    }
    assert {
        each for each in module.__all__ if not each.isupper()
    } <= defined  # a constant does not say where it is from
    if name == "parameters":
        assert set(module.__all__) == defined
