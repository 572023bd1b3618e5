"""Layers without a framework: settings, initial values, and the call."""

import dataclasses
import inspect
import json
from typing import ClassVar

import numpy as np
import pytest
from layer_helpers import CASES, NUMPY, perturbed

import attention_core as ac
import attention_models as models
from attention_core import layers, parameters
from attention_core.layers import adapters
from attention_core.random import Dropout, dropout_mask

LAYERS = {
    "multi-head": layers.MultiHeadAttention(12, 3, key_bias=False, scale=0.5, dropout=0.1),
    "grouped": layers.MultiHeadAttention(12, 6, num_key_value_heads=2, value_head_dim=3, output_channels=5),
    "feed-forward": layers.FeedForward(4, 8, bias=False),
    "encoder": layers.EncoderLayer(12, 3, 8, norm_first=False),
    "embeddings": layers.Embeddings(5, 7, 4, num_segments=2),
    "bare embeddings": layers.Embeddings(5, 7, 4, norm=False),
    "norm": layers.RMSNorm(6, epsilon=1e-3),
    "gated feed-forward": layers.GatedFeedForward(4, 8, bias=True, activation="gelu_tanh"),
    "decoder layer": layers.DecoderLayer(12, 6, 8, num_key_value_heads=2, query_key_norm=True, memory_channels=5),
    "decoder": models.Decoder(
        7, 8, 2, 6, 2, attention_bias=True, post_norm=True, tied=False, window=(3, None), rotary_divisors=(2.0, 1.5)
    ),
    "feature maps": layers.SaganAttention(16),
    "feature maps without output": layers.SaganAttention(16, output=False, spectral_norm=False, bias=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_settings_make_the_layer_again(name):
    settings = LAYERS[name].settings()
    assert layers.layer_from_settings(settings) == LAYERS[name]
    assert json.loads(json.dumps(settings)) == settings


def test_settings_are_plain_numbers():
    assert type(layers.MultiHeadAttention(8, 2, scale=np.float64(0.5)).settings()["scale"]) is float


@pytest.mark.parametrize("name", LAYERS)
def test_names_of_arrays_make_the_tree_again(name):
    tree = LAYERS[name].init(3, xp=ac.backend.get_backend("numpy").namespace)
    names = layers.named_arrays(tree)
    again = layers.tree_from_names(LAYERS[name].parameters, names)
    assert type(again) is type(tree)
    assert all(layers.named_arrays(again)[path] is array for path, array in names.items())


def test_another_seed_gives_other_values_and_no_two_parameters_are_alike(xp, get):
    layer = layers.FeedForward(8, 8)
    first, other = (get(layer.init(seed, xp=xp)) for seed in (1, 2))
    assert not np.array_equal(first.expand.weight, other.expand.weight)
    assert not np.array_equal(first.expand.weight, first.contract.weight)
    assert not first.expand.bias.any()


@pytest.mark.needs("dtype")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dropout_of_a_feed_forward_is_rounded_once(dtype, backend, rng):
    """And without a seed nothing is dropped."""
    layer, xp = layers.FeedForward(6, 8, dropout=0.3), backend.namespace
    tree = backend.from_numpy(layer.init(1, xp=np), dtype=dtype)
    x = backend.from_numpy(rng.normal(size=(5, 6)), dtype=dtype)
    wide = backend.from_numpy(backend.to_numpy(tree), dtype="float32")
    exact = layer(wide, backend.from_numpy(backend.to_numpy(x), dtype="float32"), seed=7)
    found = layer(tree, x, seed=7)
    np.testing.assert_array_equal(backend.to_numpy(found), backend.to_numpy(xp.astype(exact, found.dtype)))
    plain = backend.to_numpy(ac.functions.feed_forward(tree, x))
    np.testing.assert_array_equal(backend.to_numpy(layer(tree, x)), plain)
    assert np.sum(backend.to_numpy(found) == 0) > 0
    assert np.all(plain != 0)


def test_a_single_vector_may_be_dropped_from(xp, put, get):
    layer = layers.FeedForward(6, 40, output_channels=40, dropout=0.5)
    tree, x = put(layer.init(1, xp=np)), put(np.ones(6, dtype=np.float32))
    found, plain = get(layer(tree, x, seed=7)), get(layer(tree, x))
    kept = get(dropout_mask(Dropout(0.5, 7), put(np.ones((1, 40), dtype=np.float32)), xp=xp))[0]
    np.testing.assert_allclose(found, np.where(kept, 2 * plain, 0), rtol=1e-6)
    assert 0 < kept.sum() < 40


def test_masks_of_queries_and_keys_come_together(put, get, rng):
    layer = layers.MultiHeadAttention(12, 3, output=False)
    tree = put(layer.init(1, xp=np))
    x = put(rng.normal(size=(2, 5, 12)).astype(np.float32))
    queries, keys, pairs = rng.random((2, 5)) < 0.7, rng.random((2, 5)) < 0.7, rng.random((5, 5)) < 0.7
    both = put(queries[:, None, :, None] & keys[:, None, None, :] & pairs)
    found = layer(tree, x, mask=put(pairs), query_mask=put(queries), key_mask=put(keys))
    np.testing.assert_allclose(get(found), get(layer(tree, x, mask=both)), rtol=1e-5, atol=1e-6)
    assert not get(found)[~queries].any()


def test_a_zero_key_takes_its_share(put, get, rng):
    plain, layer = (layers.MultiHeadAttention(8, 2, zero_attention=zero, output=False) for zero in (False, True))
    p = plain.init(1, xp=np)
    x = rng.normal(size=(5, 8)).astype(np.float32)
    q, k, v = ((x @ each.weight).reshape(5, 2, 4).swapaxes(0, 1) for each in p[:3])
    powers = np.exp(q @ k.swapaxes(-1, -2) / 2)
    expected = (powers @ v / (powers.sum(-1, keepdims=True) + 1)).swapaxes(0, 1).reshape(5, 8)
    np.testing.assert_allclose(get(layer(put(p), put(x))), expected, rtol=1e-4, atol=1e-6)


def test_kernels_of_feature_maps_count_without_their_size(xp, put, get, rng):
    layer = layers.SaganAttention(7)  # fewer than 8: theta and phi have one channel
    tree, state = put((layer.init(1, xp=np), layer.init_state(1, xp=np)))
    larger = tree._replace(theta=tree.theta._replace(weight=xp.multiply(tree.theta.weight, 8.0)))
    x = put(rng.normal(size=(4, 4, 7)).astype(np.float32))
    weights, expected = (layer(kernels, x, state=state, return_weights=True).weights for kernels in (larger, tree))
    assert np.ptp(get(expected)) > 0.01
    np.testing.assert_allclose(get(weights), get(expected), rtol=1e-5)
    plain = layers.SaganAttention(7, spectral_norm=False)
    weights, expected = (plain(kernels, x, return_weights=True).weights for kernels in (larger, tree))
    assert np.abs(get(weights) - get(expected)).max() > 1e-3


def test_the_state_of_feature_maps_is_updated_by_a_step_of_power_iteration(xp, put, get):
    layer = layers.SaganAttention(16)
    tree, state = put((layer.init(1, xp=np), layer.init_state(1, xp=np)))
    again = layer.updated_state(tree, state)
    for name in state._fields:
        expected = ac.functions.spectral_norm(getattr(tree, name).weight, getattr(state, name))[1]
        np.testing.assert_array_equal(get(getattr(again, name)), get(expected))
    with pytest.raises(TypeError):
        layer(tree, xp.ones((4, 4, 16), dtype=xp.float32))
    assert LAYERS["feed-forward"].updated_state(tree, ()) == ()


def test_parameters_have_the_shapes_of_the_settings():
    tree = LAYERS["grouped"].parameters
    assert isinstance(tree, parameters.MultiHeadAttention)
    dims = {name: leaf.dims for name, leaf in layers.named_arrays(tree).items() if name.endswith("weight")}
    assert dims == {"query.weight": (12, 12), "key.weight": (12, 4), "value.weight": (12, 6), "output.weight": (18, 5)}


def test_kinds_are_the_layers_by_name():
    assert {type(layer).__name__ for layer in LAYERS.values()} == {*layers.KINDS, "Decoder"}
    assert all(kind.__name__ == name and issubclass(kind, layers.Layer) for name, kind in layers.KINDS.items())


def test_a_layer_of_users_may_have_settings_of_any_type():
    @dataclasses.dataclass(frozen=True)
    class Mine(layers.Layer):
        sizes: tuple = (3, 4)
        width: int = 5
        parameters = ()

    assert Mine().sizes == (3, 4)
    with pytest.raises(ValueError):
        Mine(width=0)


class Held(adapters.Adapted):
    """A layer of a package, which holds arrays of NumPy.

    Parameters
    ----------
    *settings
        Of the definition.
    seed : int
        Of the first values.
    """

    _classes: ClassVar = {}

    def __init__(self, *settings, seed=0, **named):
        definition = self.kind(*settings, **named)
        self.held = definition.init(seed, xp=np), definition.init_state(seed, xp=np)
        self.definition = definition

    @classmethod
    def _complete(cls):
        cls.__init__ = adapters.constructor(Held, cls.kind)
        cls.__doc__ = adapters.described(cls.kind.__doc__, Held.__doc__, class_doc="A layer that is held.")
        cls.call = adapters.call_of(cls.kind, "call", renamed={"seed": "draw"}, added=["training"])

    @classmethod
    def from_numpy(cls, definition, parameters, state=()):
        layer = cls._class_of(definition, parameters, state)(**vars(definition))
        layer.held = parameters, state
        return layer

    def _call(self, *arrays, training, draw=None, **options):
        (parameters, state), seeded = self.held, {"seed": draw} if training else {}
        return self.definition(parameters, *arrays, **options, **seeded, **({"state": state} if state else {}))


@pytest.mark.parametrize("name", layers.KINDS)
def test_a_package_makes_a_layer_of_a_definition(name, monkeypatch):
    """With its settings, its calls and their documentation, and words of its own."""
    monkeypatch.setattr(Held, "_classes", {})
    kind, (settings, arrays, options) = type(name, (Held,), {}), CASES[name]
    definition, arrays = layers.KINDS[name](**settings), NUMPY.from_numpy(arrays, dtype="float32")
    parameters, state = perturbed(definition)
    layer = Held.from_numpy(definition, parameters, state)
    assert type(layer) is kind
    assert list(inspect.signature(kind).parameters) == [*inspect.signature(kind.kind).parameters, "seed"]
    assert kind.__doc__.startswith("A layer that is held.\n\nParameters\n")
    assert "\nseed : int\n    Of the first values." in kind.__doc__
    drawn = inspect.signature(kind.call).parameters.keys() & {"draw"}
    held = {"state": state} if state else {}
    expected = definition(parameters, *arrays, **options, **held, **dict.fromkeys(["seed"] * len(drawn), 7))
    found = layer.call(*arrays, **options, **dict.fromkeys(drawn, 7), training=bool(drawn))
    np.testing.assert_array_equal(found, expected)
