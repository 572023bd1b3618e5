"""Wrong arguments of all public functions: numbers without bound, namespaces, arrays of other libraries, names."""

import copy
import inspect
import json
import pickle
import types
from fractions import Fraction

import array_api_strict
import numpy as np
import pytest
from option_helpers import calls

import attention_core as ac
import attention_models as models
from attention_core import cache, functions, initializers, layers, masks, pieces, random, scores, weights

X = np.ones((1, 2, 4, 6), "float32")
MODULES = (ac, cache, functions, initializers, masks, models, pieces, random, scores, weights)


def attend(put, **options):
    return ac.scaled_dot_product_attention(*put([X, X, X]), **options)


def functions_with(parameter):
    found = {}
    for module in MODULES:
        for name in module.__all__:
            thing = getattr(module, name)
            if isinstance(thing, types.FunctionType) and parameter in inspect.signature(thing).parameters:
                found[name] = thing
    return found


@pytest.mark.parametrize(
    "wrong", ["text", 3, object(), int, array_api_strict.asarray, {}], ids=lambda each: type(each).__name__
)
def test_what_is_no_namespace_is_refused(wrong, put, xp):
    """By every function above that takes one."""
    named = calls(put, xp)
    taken = [name for name in functions_with("xp") if name in named and not name.startswith("empty_")]
    assert len(taken) >= 7
    for name in taken:
        with pytest.raises(TypeError):
            named[name](xp=wrong)


@pytest.mark.needs(lambda backend: backend.name != "array_api_strict")
def test_the_namespace_of_another_library_is_refused(backend, put):
    with pytest.raises(TypeError):
        attend(put, xp=array_api_strict)


def test_the_module_of_a_library_stands_for_its_namespace(backend, put, get):
    module, options = __import__(backend.name), {"mask": ac.SlidingWindow(left=2), "dropout": ac.Dropout(0.5, 3)}
    np.testing.assert_array_equal(get(attend(put, xp=module, **options)), get(attend(put, **options)))
    assert get(ac.cache.empty_cache((2,), 2, 4, 3, xp=module).key).shape == (2, 2, 4, 3)
    assert get(ac.Causal().to_array(2, 3, xp=module)).shape == (2, 3)


FOREIGN = {
    "scale": lambda a: {"scale": a.asarray(1.0)},
    "softcap": lambda a: {"softcap": a.asarray(1.0)},
    "sinks": lambda a: {"sinks": a.asarray([1.0, 2.0])},
    "bias": lambda a: {"bias": a.zeros((4, 4))},
    "mask": lambda a: {"mask": a.ones((4, 4), dtype=a.bool)},
    "dropout.seed": lambda a: {"dropout": ac.Dropout(0.5, a.asarray(1))},
    r"score_mod\.arrays\.0": lambda a: {"score_mod": scores.ScoreMod(lambda s, *_: s, (a.asarray(1.0),))},
}


@pytest.mark.needs(lambda backend: backend.name != "array_api_strict")
@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("explicit", [False, True], ids=["found", "explicit"])
def test_arrays_of_another_library_are_named(name, explicit, backend, put, xp):
    options = FOREIGN[name](array_api_strict) | ({"xp": xp} if explicit else {})
    with pytest.raises(TypeError):
        attend(put, **options)


def test_copies_and_pickles_of_a_backend_are_this_one(backend):
    for again in (
        copy.copy(backend),
        copy.deepcopy({"backend": backend})["backend"],
        pickle.loads(pickle.dumps(backend)),
    ):
        assert again is backend


def test_without_metadata_no_backend_is_announced(backend, monkeypatch):
    monkeypatch.setattr("attention_core._backend._find.entries", dict)
    with pytest.raises(ImportError):
        ac.backend.get_backend(backend.name)


def test_caches_lie_on_a_device_of_the_library(xp):
    for device in ("no device", object(), 10**6):
        with pytest.raises(ValueError):
            ac.cache.empty_cache((2,), 2, 4, 3, device=device, xp=xp)


def test_integers_of_numpy_are_integers_on_every_library(put, get):
    """One answer everywhere: as positions, offsets, lengths and seeds, they are those of Python."""
    three = np.int64(3)
    for make in (
        lambda n: ac.Causal(offset=n),
        lambda n: ac.KeyLengths(n),
        lambda n: ac.SlidingWindow(left=2, right=1, offset=n),
    ):
        np.testing.assert_array_equal(get(attend(put, mask=make(three))), get(attend(put, mask=make(3))))
    for make in (lambda n: {"dropout": ac.Dropout(0.5, n)}, lambda n: {"score_mod": scores.alibi(2, offset=n)}):
        np.testing.assert_array_equal(get(attend(put, **make(three))), get(attend(put, **make(3))))
    for number in (three, 3):
        partial = ac.pieces.partial_attention(*put([X, X, X]), is_causal=True, query_start=number)
        assert get(partial.output).shape == X.shape
    length = put(np.asarray(5))
    np.testing.assert_array_equal(*(get(ac.cache.cache_mask(length, n).offset) for n in (np.int64(2), 2)))
    x, key_value = put(np.ones((2, 3, 6), "float32")), put(layers.MultiHeadAttention(6, 3).init(0, xp=np))
    for n in (np.int32(3), np.uint8(3)):
        assert ac.split_heads(x, n).shape == (2, 3, 3, 2)
        assert ac.multi_head_attention(key_value, x, num_heads=n, num_key_value_heads=n).shape == x.shape
        heads, width = put(np.ones((1, 2, 6), "float32")), n + n.dtype.type(1)
        assert functions.rotary_embedding(heads, put(np.arange(2)), width=width).shape == (1, 2, 6)


def test_integers_of_numpy_are_sizes():
    """Settings and rules hold Python's, so that they equal those, are written as JSON, and are told apart by type."""
    n = np.int64
    window = ac.SlidingWindow(left=n(4), right=n(1))
    assert (type(window.left), type(window.right)) == (int, int)
    layer = layers.DecoderLayer(n(8), n(2), n(16), window=n(3), rotary_width=n(2))
    assert layer == layers.layer_from_settings(json.loads(json.dumps(layer.settings())))
    options = {"num_heads": 2, "rotary_base": 9.0, "rotary_width": n(2), "arithmetic": "reproducible"}
    functions.decoder_layer(layer.init(0, xp=np), np.ones((1, 2, 8), "float32"), **options)
    model = models.Decoder(n(50), n(8), n(2), n(16), num_layers=n(2), window=(n(2), None))
    assert model == layers.layer_from_settings(json.loads(json.dumps(model.settings())))
    assert type(scores.ScoreMod(lambda scores, *places: scores, num_heads=n(2)).num_heads) is int
    assert ac.cache.empty_cache((n(2),), n(2), n(4), n(3), xp=np).key.shape == (2, 2, 4, 3)
    assert random.random_bits(n(1), (n(2), n(3)), xp=np).shape == (2, 3)
    prompt, options = np.asarray([[3, 14]]), {"stop_ids": [n(3)], "seed": n(2)}
    found = models.generate(
        model, model.init(0, xp=np), prompt, max_new_tokens=n(3), top_k=n(4), capacity=n(9), **options
    )
    assert found.token_ids.shape == (1, 3)
    for wrong in (True, 4.0, np.bool_(True), np.float64(4), np.asarray(4), "4"):
        with pytest.raises(TypeError):
            ac.SlidingWindow(left=wrong)
        with pytest.raises(TypeError):
            layers.MultiHeadAttention(wrong, 2)
        with pytest.raises(TypeError):
            models.generate(model, model.init(0, xp=np), prompt, max_new_tokens=1, stop_ids=[wrong])


@pytest.mark.parametrize("options", [{}, {"implementation": "blockwise"}, {"arithmetic": "reproducible"}], ids=str)
def test_the_order_of_bytes_changes_nothing(options, rng):
    arrays = [rng.standard_normal((2, 5, 4)).astype("float32") for _ in range(3)]
    ids = np.asarray([0, 0, 1, 1, 2])

    def attended(orders, of_ids):
        query, key, value = (each.astype(f"{order}f4") for each, order in zip(arrays, orders, strict=True))
        mask = ac.Segments(ids.astype("<i4"), ids.astype(f"{of_ids}i4"))
        cut = [ac.pieces.partial_attention(query, key[:, at], value[:, at]) for at in (slice(2), slice(2, None))]
        whole = ac.scaled_dot_product_attention(query, key, value, mask=mask, **options)
        return whole, ac.pieces.merge_partials(*cut).output

    for found, expected in zip(attended("<><", ">"), attended("<<<", "<"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert attended("><>", "<")[0].dtype == ">f4"


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_integer_arrays_are_numbers_of_scores(implementation, put, get):
    """As `jax.jit` makes one of a Python integer."""
    found, wanted = (
        attend(put, scale=scale, softcap=softcap, implementation=implementation)
        for scale, softcap in (put([np.asarray(2, "int32"), np.asarray(3, "int32")]), (2, 3))
    )
    np.testing.assert_allclose(get(found), get(wanted), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rate", [np.float32(0.25), np.float64(0.25), np.float16(0.25), Fraction(1, 4)])
def test_a_number_of_any_library_is_a_rate(rate, put, get):
    dropout = ac.Dropout(rate, 3)
    assert (type(dropout.rate), dropout) == (float, ac.Dropout(0.25, 3))
    np.testing.assert_array_equal(get(attend(put, dropout=dropout)), get(attend(put, dropout=ac.Dropout(0.25, 3))))
    layer = layers.EncoderLayer(8, 2, 16, dropout=rate, epsilon=rate)
    assert layers.layer_from_settings(json.loads(json.dumps(layer.settings()))) == layer
