"""Files of parameters: what is written comes back bit for bit, and what is not whole is an error by name."""

import doctest
import json
import pickle
import stat
import sys

import ml_dtypes
import numpy as np
import pytest
from backend_helpers import archive, assert_same_tree
from safetensors.numpy import load_file, save_file

from attention_core import layers, parameters
from attention_core.backend import get_backend
from attention_files import safetensors
from attention_files.safetensors import (
    FileError,
    load_arrays,
    load_layer,
    load_layers,
    load_tree,
    save_arrays,
    save_layer,
    save_layers,
    save_tree,
)

DTYPES = ["float16", ml_dtypes.bfloat16, "float32", "float64", "bool"]
DTYPES += [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
LAYERS = [
    layers.MultiHeadAttention(12, 3, key_channels=5, value_channels=7, query_bias=False, dropout=0.1),
    layers.MultiHeadAttention(12, 6, 2, bias=False, output=False),
    layers.FeedForward(4, 9, output_channels=3),
    layers.EncoderLayer(8, 2, 16, epsilon=1e-12),
    layers.Embeddings(11, 7, 4, norm=False),
    layers.Embeddings(11, 7, 4, num_segments=2),
    layers.SaganAttention(16),
    layers.SaganAttention(16, output=False, spectral_norm=False, pool=False, bias=True, value_channels=16),
]


def drawn(rng, dtype, *dims):
    """Any bits at all: NaN with payloads, signed zeros and subnormals among them."""
    size = np.dtype(dtype).itemsize
    if np.dtype(dtype) == bool:
        return rng.integers(0, 2, dims).astype(bool)
    return np.frombuffer(rng.bytes(size * int(np.prod(dims))), dtype=dtype).reshape(dims)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.safetensors"


def made(layer, dtype="float32"):
    values = layer.init(3, xp=np), layer.init_state(3, xp=np)
    return get_backend("numpy").from_numpy(values, dtype=dtype)


# --- any tree ---


@pytest.mark.parametrize("dims", [(), (0,), (3, 0, 2), (1,), (3, 5), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_an_array_comes_back_bit_for_bit(path, rng, dtype, dims):
    array = drawn(rng, dtype, *dims)
    save_tree(path, array)
    found, settings = load_tree(path)
    assert_same_tree(found, array)
    assert settings is None
    assert found.flags.writeable


def test_a_tree_of_everything_comes_back(path, rng):
    linear = parameters.Linear(drawn(rng, "float32", 2, 3))
    tree = {
        "list": [linear, None, (), [], {}],
        "tuple": (np.asarray(7), {"b.c": linear, "a": [np.zeros(0, bool)]}),
        "state": layers.SpectralVectors(*(drawn(rng, ml_dtypes.bfloat16, 3) for _ in range(3))),
    }
    settings = {"text": "é", "numbers": [1, 0.1, -1e300, 2**70], "none": None, "deep": {"on": True}}
    save_tree(path, tree, settings)
    found, again = load_tree(path)
    assert_same_tree(found, tree)
    assert again == settings


@pytest.mark.parametrize(
    "view",
    [lambda x: x.T, lambda x: x[::-1, ::2], lambda x: np.broadcast_to(x[0], (5, 6)), lambda x: x.astype(">f4")],
    ids=["transposed", "strided", "broadcast", "big-endian"],
)
def test_views_are_kept_by_value(path, rng, view):
    array = view(rng.standard_normal((4, 6)).astype(np.float32))
    save_tree(path, [array])
    (found,), _ = load_tree(path)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == np.float32


def test_a_state_stands_next_to_the_parameters(path):
    layer = layers.SaganAttention(16)
    save_layer(path, layer, *made(layer))
    names = set(load_file(path))
    assert {"theta.weight", "sigma", "state.theta", "state.output"} <= names


@pytest.mark.parametrize(
    "tree",
    [
        *(1.5, {"a": ["text"]}, (np.zeros(1), {"x": {3}}), len, {1: np.zeros(2)}, {"": np.zeros(2)}),
        *(np.zeros(2, complex), np.zeros(2, object), np.zeros(2, "U3")),
        *({"a.b": np.zeros(2), "a": {"b": np.zeros(2)}}, {"__metadata__": np.zeros(2)}),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_what_is_no_tree_of_arrays_is_not_written(path, tree):
    with pytest.raises(FileError):
        save_tree(path, tree)
    assert not path.exists()


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_no_file_can_have_are_not_written(path, name):
    safetensors.save_arrays(path, {"old": np.ones(2)})
    with pytest.raises(FileError):
        safetensors.save_arrays(path, {name: np.ones(2)})
    assert list(safetensors.load_arrays(path)[0]) == ["old"]


def test_a_foreign_named_tuple_is_not_written(path):
    from collections import namedtuple

    for name in ("Foreign", "Linear"):
        foreign = namedtuple(name, ["weight", "bias"])
        with pytest.raises(FileError):
            save_tree(path, foreign(np.zeros(1), None))


@pytest.mark.parametrize("settings", [{"x": float("nan")}, {"x": np.float32(1)}, {"x": (1, 2)}, {1: 2}], ids=str)
def test_settings_that_json_does_not_give_back_are_not_written(path, settings):
    with pytest.raises(FileError):
        save_tree(path, (), settings)


# --- layers ---


def test_several_layers_come_back(path):
    trees, states = zip(*map(made, LAYERS), strict=True)
    save_layers(path, LAYERS, trees, states)
    found = load_layers(path)
    assert found[0] == tuple(LAYERS)
    assert_same_tree(found[1:], (trees, states))
    with pytest.raises(FileError):
        load_layer(path)
    save_layer(path, LAYERS[3], trees[3])
    assert load_layers(path)[0] == (LAYERS[3],)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p._replace(contract=p.contract._replace(bias=None)),
        lambda p: p._replace(expand=p.expand._replace(weight=p.expand.weight.T)),
        lambda p: p._replace(expand=p.expand._replace(bias=np.zeros(9, int))),
        lambda p: p._replace(expand=p.contract),
        lambda p: p.expand,
        lambda p: (),
    ],
)
def test_parameters_that_do_not_fit_are_neither_written_nor_read(path, change):
    layer = layers.FeedForward(4, 9)
    wrong = change(made(layer)[0])
    with pytest.raises(FileError):
        save_layer(path, layer, wrong)
    save_tree(path, (wrong, ()), layer.settings())
    with pytest.raises(FileError):
        load_layer(path)


# --- files that are broken, or of another kind ---


@pytest.fixture
def whole(path):
    layer = layers.MultiHeadAttention(8, 2)
    save_layer(path, layer, *made(layer))
    return path.read_bytes()


class Trap:
    def __reduce__(self):
        return pytest.fail, ("it was unpickled",)


@pytest.mark.parametrize(
    "data",
    [
        *[pickle.dumps(Trap(), protocol) for protocol in range(6)],
        *(b"PK\3\4" + bytes(99), b"\x89HDF\r\n\x1a\n" + bytes(99), b"GGUF" + bytes(99), b"<!DOCTYPE html>"),
        *map(archive, ("model.weights.h5", "query.npy", "layer/data.pkl")),
        *(b"", b"\xff" * 99, b"{}"),
    ],
    ids=lambda data: repr(data[:8]),
)
def test_a_file_of_another_kind_is_told_and_never_unpickled(path, data):
    path.write_bytes(data)
    with pytest.raises(FileError) as error:
        load_tree(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_and_a_directory_are_told(tmp_path, path):
    with pytest.raises(FileError):
        load_tree(path)
    with pytest.raises(FileError):
        load_tree(tmp_path)
    with pytest.raises(FileError):
        save_tree(tmp_path, ())
    with pytest.raises(FileError):
        save_tree(tmp_path / "no" / "folder", ())


def test_safetensors_of_others_are_told_from_ours(path):
    save_file({"weight": np.zeros(3)}, path, metadata={"format": "pt"})
    with pytest.raises(FileError):
        load_tree(path)
    arrays, metadata = load_arrays(path)
    assert list(arrays) == ["weight"]
    assert metadata == {"format": "pt"}


ARRAY = {"Linear": {"weight": "weight", "bias": None}}


@pytest.mark.parametrize(
    "header",
    [
        *("no JSON", "[" * 100000, "3"),
        {"tree": ARRAY},
        {"version": 2, "tree": ARRAY},
        {"version": 1},
        {"version": 1, "tree": ARRAY, "settings": 3},
        {"version": 1, "tree": "other"},
        {"version": 1, "tree": ["weight", "weight"]},
        {"version": 1, "tree": None},
        {"version": 1, "tree": {"__import__": {"os": "weight"}}},
        {"version": 1, "tree": {"Linear": {"weight": "weight"}}},
        {"version": 1, "tree": {"Linear": {"bias": None, "weight": "weight"}}},
        {"version": 1, "tree": {"Linear": ["weight", None]}},
        {"version": 1, "tree": {"tuple": "weight"}},
        {"version": 1, "tree": {"list": [], "tuple": []}},
        {"version": 1, "tree": 7},
    ],
    ids=lambda each: str(each)[:60],
)
def test_structures_that_are_not_ours_are_told(path, header):
    text_of = header if isinstance(header, str) else json.dumps(header)
    save_arrays(path, {"weight": np.zeros(3)}, {"attention-core": text_of})
    with pytest.raises(FileError) as error:
        load_tree(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("times", [1, 100])
def test_a_tree_too_deep_is_told(path, times):
    depth = times * sys.getrecursionlimit()
    header = '{"version": 1, "tree": ' + "[" * depth + "]" * depth + "}"
    save_arrays(path, {}, {"attention-core": header})
    with pytest.raises(FileError):
        load_tree(path)


# --- a save that fails ---


@pytest.mark.parametrize("method", ["replace", "open"])
def test_a_save_that_fails_leaves_the_old_file(path, whole, monkeypatch, method):
    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.Path, method, fail)
    with pytest.raises(FileError):
        save_tree(path, [np.zeros(3)])
    monkeypatch.undo()
    assert path.read_bytes() == whole
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_file_is_written_with_the_rights_of_any_other(path, tmp_path):
    save_tree(path, ())
    (tmp_path / "other").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_a_link_stays_a_link(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    save_tree(link, [np.ones(2)])
    assert link.is_symlink()
    assert load_tree(path)[0][0].tolist() == [1, 1]


def test_examples_of_the_docstrings_run():
    found = doctest.testmod(safetensors)
    assert found.attempted > 0
    assert found.failed == 0
