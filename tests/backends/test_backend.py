"""Backends: how they are found, and what every one of them guarantees."""

import importlib.util
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
from backend_helpers import Pair, assert_same_bits, floats, run

from attention_core._backend import _find
from attention_core.backend import Backend, available_backends, get_backend

FLOATING = ("float16", "bfloat16", "float32", "float64")

# PyTorch compiles, and differentiates forward, by parts of its own that it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def extremes(dtype: str) -> np.ndarray:
    """Numbers that are lost where bits are not kept: signed zeros, infinities, NaN, subnormals, the largest."""
    limits = ml_dtypes.finfo(dtype)
    smallest, largest = float(limits.smallest_subnormal), float(limits.max)
    return floats(
        1.5, 0.0, -0.0, float("inf"), -float("inf"), float("nan"), smallest, -smallest, largest, -largest, dtype=dtype
    )


def test_backends_are_listed_in_the_order_of_their_names():
    names = available_backends()
    assert names == sorted(names)
    assert "numpy" in names


def test_missing_library_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert available_backends() == []
    with pytest.raises(ImportError) as error:
        _find._load.__wrapped__("jax")  # past the cache
    assert error.value.name == "jax"


def test_listing_backends_imports_none_of_them():
    printed = run("""
        import sys
        from attention_core._backend import available_backends, entries
        available_backends()
        adapters = {entry.module for entry in entries().values()}
        print([name for name in sys.modules if name in {*entries(), *adapters}])
    """)
    assert printed == "[]"


@pytest.mark.needs(lambda backend: backend.name in ("numpy", "tensorflow"))
def test_an_adapter_without_layers_announces_its_backend_alone(backend):
    assert dir(importlib.import_module(f"attention_{backend.name}")) == ["backend"]


def test_backend_imports_no_other_but_that_of_numpy(backend):
    printed = run(f"""
        import sys
        from attention_core._backend import entries, get_backend
        get_backend({backend.name!r})
        print(*sorted({{entry.module.partition(".")[0] for entry in entries().values()}} & set(sys.modules)))
    """)
    package = "attention_numpy" if backend.name == "array_api_strict" else f"attention_{backend.name}"
    assert printed.split() == sorted({"attention_numpy", package})


def test_backend_keeps_the_contract(backend):
    assert isinstance(backend, Backend)
    assert get_backend(backend.name) is backend
    assert backend.modes[0] == "eager"
    assert "float32" in backend.dtypes
    assert set(backend.dtypes) <= set(FLOATING)


def test_devices_and_versions_have_names(backend):
    assert backend.devices()
    assert len(set(backend.devices())) == len(backend.devices())
    assert all(isinstance(device, str) for device in backend.devices())
    assert all(isinstance(text, str) for pair in backend.versions().items() for text in pair)
    assert backend.name.replace("_", "-") in backend.versions()


def test_backend_owns_its_arrays_and_nothing_else(backend):
    assert backend.owns(backend.from_numpy(floats(1.0)))
    assert backend.owns(floats(1.0)) == (backend.name == "numpy")
    assert not any(map(backend.owns, (None, 1, 1.0, [1.0], "1.0", object())))


@pytest.mark.parametrize("make", [np.ma.asarray, np.asmatrix])
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_arrays_that_only_look_like_plain_ones_are_refused(make):
    with pytest.raises(TypeError):
        get_backend("numpy").owns(make(floats(1.0)))


@pytest.mark.parametrize("dtype", FLOATING)
def test_floating_point_comes_back_bit_for_bit_or_is_refused(backend, dtype):
    array = extremes(dtype).reshape(2, 5)
    if dtype in backend.dtypes:
        assert_same_bits(backend.to_numpy(backend.from_numpy(array)), array)
    else:
        with pytest.raises(ValueError):
            backend.from_numpy(array)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int16", "int32", "uint8"])
def test_integers_come_back_bit_for_bit(backend, dtype):
    array = np.asarray([[0, 1, 1], [100, 1, 0]]).astype(dtype)
    assert_same_bits(backend.to_numpy(backend.from_numpy(array)), array)


def test_wide_integers_keep_their_value(backend):
    array = np.asarray([-7, 2**40 if "float64" in backend.dtypes else 2**30])
    np.testing.assert_array_equal(backend.to_numpy(backend.from_numpy(array)), array)


ARRAYS = [np.full(shape, 1.5, dtype="float32") for shape in ((), (0,), (3, 0, 2), (2, 3))]
ARRAYS += [np.arange(6, dtype="float32").reshape(2, 3).T[::-1]]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.shape))
def test_arrays_of_every_shape_and_layout_come_back(backend, array):
    assert tuple(backend.from_numpy(array).shape) == array.shape
    assert_same_bits(backend.to_numpy(backend.from_numpy(array)), array)


def test_arrays_share_no_memory_with_numpy(backend):
    array = floats(1.0, 2.0)
    placed = backend.from_numpy(array)
    array[0] = 7.0
    returned = backend.to_numpy(placed)
    returned[1] = 7.0
    np.testing.assert_array_equal(backend.to_numpy(placed), [1.0, 2.0])


@pytest.mark.parametrize("dtype", FLOATING)
def test_only_floating_point_takes_the_dtype_asked_for(backend, dtype):
    if dtype not in backend.dtypes:
        with pytest.raises(ValueError):
            backend.from_numpy(floats(1.0), dtype=dtype)
        return
    tree = [floats(0.1, -3.0, dtype="float64"), floats(2.5, dtype="bfloat16"), np.asarray([1], dtype="int32")]
    first, second, count = backend.to_numpy(backend.from_numpy(tree, dtype=dtype))
    assert_same_bits(first, floats(0.1, -3.0, dtype=dtype))
    assert_same_bits(second, floats(2.5, dtype=dtype))
    assert_same_bits(count, tree[2])


def test_values_beyond_the_range_become_infinite(backend):
    placed = backend.from_numpy(floats(1e300, -1e300, dtype="float64"), dtype="float32")
    np.testing.assert_array_equal(backend.to_numpy(placed), [np.inf, -np.inf])


def test_trees_keep_their_structure(backend):
    tree = {"pair": Pair(floats(1.0), [floats(2.0), None]), "rest": (Pair(3), 0.5, True, "x", {}), "empty": []}
    placed = backend.from_numpy(tree)
    assert backend.owns(placed["pair"].first)
    assert backend.owns(placed["pair"].second[0])
    assert placed["rest"] == (Pair(3), 0.5, True, "x", {})
    returned = backend.to_numpy(placed)
    assert str(returned) == str(tree)
    assert isinstance(returned["pair"], Pair)


def test_what_is_no_numpy_array_is_refused(backend):
    with pytest.raises(TypeError):
        backend.from_numpy([object()])


def test_arrays_are_placed_where_asked(backend):
    array = floats(1.0, -2.0)
    for device in backend.devices():
        placed = backend.from_numpy({"x": array}, device=device)["x"]
        if backend.is_concrete(placed):
            assert_same_bits(backend.to_numpy(placed), array)


def test_unknown_device_is_told_the_known_ones(backend):
    words = f"expected a device out of {', '.join(backend.devices())}; got 'moon:1'"
    with pytest.raises(ValueError) as error:
        backend.from_numpy(floats(1.0), device="moon:1")
    assert str(error.value) == words


def test_every_mode_computes_the_same(backend):
    xp = backend.namespace

    def swap(tree, offset):
        return Pair(tree["y"].second, [xp.add(tree["x"], offset), tree["y"].first])

    arguments = backend.from_numpy(({"x": floats(1.0, 2.0), "y": Pair(None, floats(4.0))}, floats(0.5)))
    for mode in (*backend.modes, None):
        result = backend.to_numpy(backend.compile(swap, mode=mode)(*arguments))
        assert str(result) == str(Pair(floats(4.0), [floats(1.5, 2.5), None])), mode


@pytest.fixture
def few_programs(backend):
    """Two programs of a function, of which PyTorch keeps eight unless it is asked for more."""
    is_torch = backend.name == "torch"
    with importlib.import_module("torch._dynamo.config").patch(recompile_limit=2) if is_torch else nullcontext():
        yield


def test_functions_of_one_definition_compile_independently(few_programs, backend):
    xp = backend.namespace

    def multiplication(factor):
        return backend.compile(lambda x: xp.multiply(x, factor))

    for factor in range(1, 4):
        product = multiplication(float(factor))(backend.from_numpy(floats(2.0)))
        np.testing.assert_array_equal(backend.to_numpy(product), [2.0 * factor])


def test_compiled_function_takes_any_number_of_shapes(few_programs, backend):
    double = backend.compile(lambda x: backend.namespace.add(x, x))
    for length in range(1, 4):
        total = double(backend.from_numpy(np.ones(length, dtype="float32")))
        np.testing.assert_array_equal(backend.to_numpy(total), np.full(length, 2.0))


def test_eager_is_the_function_itself(backend):
    assert backend.compile(len, mode="eager") is len


def test_unknown_mode_is_told_the_known_ones(backend):
    with pytest.raises(ValueError) as error:
        backend.compile(len, mode="faster")
    assert str(error.value) == f"expected a mode out of {', '.join(backend.modes)}; got 'faster'"


def test_values_are_concrete_only_where_they_can_be_read(backend):
    closed_over = backend.from_numpy(floats(1.0))

    def looking(seen):
        def look(x):
            seen.append((backend.owns(x), backend.is_concrete(x), backend.is_concrete(closed_over)))
            return backend.namespace.add(x, closed_over)

        return look

    for mode in (*backend.modes, None):
        seen: list[tuple[bool, bool, bool]] = []
        backend.compile(looking(seen), mode=mode)(backend.from_numpy(floats(1.0)))
        eager = (mode or backend.modes[-1]) == "eager"
        assert set(seen) == {(True, eager, eager)}, mode
