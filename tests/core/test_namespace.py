"""Finding the library of an array, and the facts that the standard leaves open."""

import subprocess
import sys

import numpy as np
import pytest

import attention_core as ac
from attention_core._arrays import dtype_name, on_device_of, shape
from attention_core.backend import array_namespace, is_concrete


def test_the_namespace_is_the_backends_own(backend, put):
    assert array_namespace(put(np.ones(3)), None, 2, 0.5) is backend.namespace


@pytest.mark.parametrize("wrong", [[1.0], "text", (1.0,), object()])
def test_what_is_not_an_array_is_named(wrong):
    with pytest.raises(TypeError, match=f"expected an array; got {type(wrong).__name__}"):
        array_namespace(wrong)


def test_nothing_has_no_namespace():
    with pytest.raises(TypeError, match="expected at least one array; got none"):
        array_namespace(None, 1.0)


def test_masked_arrays_are_refused():
    masked = np.ma.masked_array(np.ones((1, 2, 3)), mask=False)
    with pytest.raises(
        TypeError, match="expected query as a plain array; got MaskedArray, whose own mask would be lost"
    ):
        ac.scaled_dot_product_attention(masked, masked, masked)


@pytest.mark.needs(lambda backend: backend.name != "numpy")
def test_libraries_are_not_mixed(backend, put):
    x, foreign = put(np.ones((1, 2, 3))), np.ones((1, 2, 3))
    with pytest.raises(TypeError, match=f"expected arrays of one library; got {backend.name} and numpy .value"):
        ac.scaled_dot_product_attention(x, x, foreign)
    with pytest.raises(TypeError, match=f"expected arrays of one library; got {backend.name} and numpy"):
        ac.scaled_dot_product_attention(x, x, x, mask=ac.Causal() & np.ones(2, dtype=bool))


@pytest.mark.parametrize("name", ["bool", "int32", "int64", "uint8", "float32"])
def test_dtypes_are_named_alike(name, put):
    assert dtype_name(put(np.zeros(2, dtype=name)).dtype) == name


def test_shapes_are_integers_where_they_are_known(put, xp):
    assert shape(put(np.zeros((2, 0, 5))), xp=xp) == (2, 0, 5)


def test_values_of_eager_arrays_can_be_read(backend, put):
    assert is_concrete(put(np.ones(3))) is True


def test_new_arrays_are_made_on_the_device_of_old_ones(put, get, xp):
    x = put(np.ones((2, 3)))
    made = xp.zeros((4,), dtype=x.dtype, **on_device_of(x))
    assert get(xp.add(made, put(np.ones(4)))).tolist() == [1.0] * 4


CODE = "import sys, attention_core; print(*sorted({name.partition('.')[0] for name in sys.modules}))"


def test_importing_the_core_imports_no_library():
    loaded = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout.split()
    assert "attention_core" in loaded
    libraries = {"numpy", "torch", "jax", "tensorflow", "dask", "keras", "ml_dtypes", "array_api_strict", "typer"}
    adapters = {name for name in loaded if name.startswith("attention_")} - {"attention_core"}
    assert not libraries & set(loaded)
    assert not adapters
