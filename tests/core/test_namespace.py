"""Finding the library of an array, and the facts that the standard leaves open."""

import contextlib
import importlib
import inspect

import numpy as np
import pytest

import attention_core as ac
import attention_models as models
from attention_core import cache, functions, layers, masks, pieces, weights
from attention_core.backend import array_namespace, explain_class
from attention_core.parameters import Embeddings
from attention_models import layouts


def test_the_namespace_is_the_backends_own(backend, put):
    assert array_namespace(put(np.ones(3))) is backend.namespace


def test_nothing_has_no_namespace():
    for nothing in (None, 1.0):
        with pytest.raises(TypeError):
            array_namespace(nothing)


@pytest.mark.needs(lambda backend: backend.name != "numpy")
def test_libraries_are_not_mixed(backend, put):
    x, foreign = put(np.ones((1, 2, 3))), np.ones((1, 2, 3))
    with pytest.raises(TypeError):
        ac.scaled_dot_product_attention(x, x, foreign)
    with pytest.raises(ValueError):
        ac.scaled_dot_product_attention(x, x, x, mask=ac.Causal() & np.ones(3, dtype=bool))
    narrow = put(np.ones((1, 2, 3), "float32"))
    with pytest.raises(TypeError):
        ac.scaled_dot_product_attention(narrow, narrow, narrow, bias=np.zeros((2, 2)))


def traced(backend, function):
    """The function as the library traces it, without compiling what it computes."""
    if backend.name == "torch":
        return __import__("torch").compile(function, fullgraph=True, backend="eager")
    return backend.compile(function, mode=backend.modes[1]) if len(backend.modes) > 1 else function


CONSTANTS = {
    "arrays": lambda rng: {
        "mask": rng.random((2, 1, 5, 5)) < 0.8,
        "bias": rng.standard_normal((5, 5), "float32"),
        "sinks": np.ones(2, "float32"),
        "scale": np.asarray(0.3, "float32"),
    },
    "rules": lambda rng: {
        "mask": ac.KeyLengths(np.asarray([2, 4])) & ac.Causal(offset=np.asarray([1, 0])) | np.eye(5, dtype=bool),
        "score_mod": ac.scores.alibi(2, offset=np.asarray(3)),
        "dropout": ac.Dropout(0.3, np.asarray([1, 2])),
    },
    "segments": lambda rng: {"mask": ac.Segments(*2 * [np.asarray([0, 0, 1, 1, 2])]), "is_causal": True},
}


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("name", CONSTANTS)
def test_numpy_arrays_among_options_are_constants(name, implementation, backend, put, get, rng):
    x, options = rng.standard_normal((2, 2, 5, 4), "float32"), CONSTANTS[name](rng)

    def attend(x):
        return ac.scaled_dot_product_attention(x, x, x, implementation=implementation, **options)

    for function in (attend, traced(backend, attend))[: 1 + (implementation == "dense" and name != "segments")]:
        np.testing.assert_allclose(get(function(put(x))), attend(x), rtol=1e-5, atol=1e-6)


@pytest.fixture
def narrowest(backend):
    """A library with the narrowest types that it may have."""
    with __import__("jax").enable_x64(False) if backend.name == "jax" else contextlib.nullcontext():
        yield


WIDE = {
    "lengths": lambda: {"mask": ac.KeyLengths(np.asarray([2**32 + 3, 2]))},
    "offsets": lambda: {"mask": ac.Causal(offset=np.asarray([2**32, -(2**33)]))},
    "segments": lambda: {"mask": ac.Segments(*2 * [np.asarray([0, 2**32, 2**32, 0, 1])])},
    "a window": lambda: {"mask": ac.SlidingWindow(left=3, right=0, offset=np.asarray(2**32 + 2))},
    "ALiBi": lambda: {"score_mod": ac.scores.alibi(2, offset=np.asarray([2**32 + 1, 0]))},
    "a seed": lambda: {"dropout": ac.Dropout(0.5, np.asarray([2**32 - 1, 7]))},
}


@pytest.mark.usefixtures("narrowest")
@pytest.mark.parametrize("name", WIDE)
def test_integers_of_numpy_beyond_those_of_a_library_do_not_wrap(name, backend, put, get, rng):
    x = rng.standard_normal((2, 2, 5, 4), "float32")

    def attend(x):
        return ac.scaled_dot_product_attention(x, x, x, **WIDE[name]())

    if backend.name == "jax" and name != "a seed":
        with pytest.raises(ValueError):
            attend(put(x))
        return
    np.testing.assert_allclose(get(attend(put(x))), attend(x), rtol=1e-5, atol=1e-6)
    near = {"lengths": {"mask": ac.KeyLengths(np.asarray([5, 2]))}, "offsets": {"mask": ac.Causal(offset=2**29)}}
    if name in near:
        expected = ac.scaled_dot_product_attention(x, x, x, **near[name])
        np.testing.assert_array_equal(attend(x)[0], expected[0])


@pytest.mark.parametrize("name", ["alibi", "relative_bias"])
def test_offsets_of_score_functions_beyond_all_positions_do_not_wrap(name, put, get, rng):
    x, table = rng.standard_normal((2, 2, 5, 4), "float32"), put(rng.standard_normal((8, 2), "float32"))
    first = 2 if name == "alibi" else table

    def attend(offset):
        mod = getattr(ac.scores, name)(first, offset=offset)
        return get(ac.scaled_dot_product_attention(*3 * [put(x)], score_mod=mod))

    np.testing.assert_array_equal(attend(put(np.asarray(2**31 - 1, "int32"))), attend(2**29 - 1))
    np.testing.assert_array_equal(attend(np.asarray(2**32 + 1)), attend(2**29 - 1))


def test_numpy_masks_of_layers_and_pieces_are_constants(put, get, rng):
    x, lengths = rng.standard_normal((2, 5, 4), "float32"), ac.KeyLengths(np.asarray([4, 2], ">i4")[::-1])
    heads, encoder = layers.MultiHeadAttention(4, 2), layers.EncoderLayer(4, 2, 6)
    options = {"mask": lengths, "bias": np.ones((5, 5), "float32"), "dropout": ac.Dropout(0.2, np.asarray(3))}
    tables = Embeddings(*(rng.standard_normal((7, 4), "float32") for _ in range(3)))
    cache = ac.cache.KeyValueCache(*2 * [np.zeros((2, 1, 9, 4), "float32")], np.asarray([1, 2], "int32"))
    for function in (
        lambda x, make: ac.functions.rotary_embedding(x, np.arange(5)),
        lambda x, make: ac.functions.embed_tokens(make(tables), np.arange(5), segment_ids=np.ones(5, int)),
        lambda x, make: ac.cache.append(make(cache), *2 * [x[:, None, ...]], num_new=np.asarray([3, 4])).key,
        lambda x, make: ac.multi_head_attention(make(heads.init(0, xp=np)), x, num_heads=2, **options),
        lambda x, make: ac.functions.encoder_layer(
            make(encoder.init(0, xp=np)), x, num_heads=2, mask=lengths, dropout=options["dropout"]
        ),
        lambda x, make: (
            ac.pieces.partial_attention(*3 * [x[:, None, ...]], mask=lengths, key_start=np.asarray(0)).logsumexp
        ),
        lambda x, make: ac.attention_scores(*2 * [x[:, None, ...]], mask=np.tril(np.ones((5, 5), bool))),
        lambda x, make: ac.cache.cache_mask(make(np.asarray([4, 3])), np.asarray([2, 1])).to_array(
            2, 5, like=x, xp=None
        ),
        lambda x, make: lengths.to_array(5, 5, like=x, xp=None),
    ):
        np.testing.assert_allclose(get(function(put(x), put)), function(x, lambda tree: tree), rtol=1e-5, atol=1e-6)


def test_adapters_say_which_classes_are_no_arrays_and_what_to_write():
    """The core names no class of a library: an adapter does, which is loaded when such a class is first met."""

    class Unwritten(np.ndarray):
        __module__ = "numpy.made_up"

    class Symbol:
        __module__ = "numpy.made_up"

    explain_class("numpy", "Unwritten", ": write it first", is_array=True)
    explain_class("numpy", "Symbol", ", which nothing takes", is_array=False)
    x = np.ones((2, 4))
    with pytest.raises(TypeError):
        ac.functions.gelu(x.view(Unwritten))
    with pytest.raises(TypeError):
        ac.functions.gelu(Symbol())


@pytest.mark.parametrize(
    "module",
    [ac, cache, functions, layers, layouts, masks, models, pieces, weights],
    ids=lambda module: module.__name__,
)
def test_public_objects_have_public_addresses(module):
    """By which pickles know them."""
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert "._" not in thing.__module__, name
            assert getattr(importlib.import_module(thing.__module__), name) is thing


@pytest.mark.needs("array_api_strict")
@pytest.mark.parametrize("version", ["2022.12", "2023.12"])
def test_an_older_version_of_the_standard_is_named(version, xp):
    """Wherever arrays or a namespace are given."""
    x, ids = xp.ones((1, 2, 3, 4), dtype=xp.float32), xp.asarray([2])
    held = cache.empty_cache((1,), 2, 8, 4, ragged=True, xp=xp)
    calls = (
        lambda: ac.scaled_dot_product_attention(x, x, x),
        lambda: functions.rms_norm(x[0, 0, 0, :], x),
        lambda: cache.append(held, x, x),
        lambda: cache.cache_mask(held, 3),
        lambda: ac.KeyLengths(ids),
        lambda: ac.Causal().to_array(3, 3, xp=xp),
        lambda: layers.MultiHeadAttention(8, 2).init(0, xp=xp),
    )
    xp.set_array_api_strict_flags(api_version=version)
    try:
        for call in calls:
            with pytest.raises(TypeError):
                call()
    finally:
        xp.reset_array_api_strict_flags()
