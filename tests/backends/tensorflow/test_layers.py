"""The layers as layers of Keras on TensorFlow: trained, masked, compiled, saved, and equal to their definitions."""

import copy
import dataclasses
import doctest
import importlib
import inspect
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import attention_tensorflow
from attention_core import get_backend, layers
from attention_core.layers import named_arrays, tree_from_names
from attention_core.masks import Causal
from attention_tensorflow.layers import (
    DotProductAttention,
    Embeddings,
    EncoderLayer,
    FeedForward,
    Layer,
    MultiHeadAttention,
    SaganAttention,
    load,
    save,
)

CASES = {
    "dot_product": (DotProductAttention, {"dropout": 0.25}, (2, 5, 6)),
    "multi_head": (
        MultiHeadAttention,
        {"channels": 6, "num_heads": 2, "num_key_value_heads": 1, "dropout": 0.25},
        (2, 5, 6),
    ),
    "feed_forward": (FeedForward, {"channels": 6, "inner": 7, "output_channels": 4, "dropout": 0.25}, (2, 5, 6)),
    "encoder": (EncoderLayer, {"channels": 6, "num_heads": 2, "inner": 7, "dropout": 0.25}, (2, 5, 6)),
    "embeddings": (Embeddings, {"num_tokens": 11, "num_positions": 9, "channels": 6, "dropout": 0.25}, (2, 5)),
    "sagan": (SaganAttention, {"channels": 8, "head_channels": 3, "value_channels": 5}, (2, 4, 6, 8)),
}
WITH_DROPOUT = [name for name in CASES if name != "sagan"]
WITH_WEIGHTS = [name for name in CASES if name != "dot_product"]
MODES = {"eager": None, "graph": {}, "xla": {"jit_compile": True}}
NUMPY = get_backend("numpy")

# So TensorFlow's variables answer when Keras writes them to its files.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)

UNFELT = ("key.bias", "attention.key.bias")  # they move all scores of a query alike, which softmax does not feel


def perturbed(definition, rng, dtype="float32"):
    """Parameters and state in which nothing is zero: sigma and biases start there."""
    trees = (
        definition.init(3, xp=NUMPY.namespace, dtype="float64"),
        definition.init_state(3, xp=NUMPY.namespace, dtype="float64"),
    )
    return tuple(
        tree_from_names(
            tree,
            {
                name: (array + 0.1 * rng.standard_normal(array.shape)).astype(dtype)
                for name, array in named_arrays(tree).items()
            },
        )
        for tree in trees
    )


def made(name, rng, dtype="float32", **more):
    kind, settings, _ = CASES[name]
    definition = kind.kind(**{**settings, **more})
    return kind.from_numpy(definition, *perturbed(definition, rng, dtype), dtype=dtype)


def example(name, rng, dtype="float32", dims=None):
    dims = CASES[name][2] if dims is None else dims
    if name == "embeddings":
        return rng.integers(0, 11, dims).astype("int32")
    return rng.standard_normal(dims).astype(dtype)


def placeholder(name, dtype="float32"):
    """An input of which nothing is known but its channels."""
    dims = CASES[name][2]
    return (
        keras.Input([None] * (len(dims) - 1), dtype="int32")
        if name == "embeddings"
        else keras.Input([*[None] * (len(dims) - 2), dims[-1]], dtype=dtype)
    )


def compiled(function, mode):
    return function if mode == "eager" else tf.function(function, autograph=False, **MODES[mode])


def defined(layer, *inputs, **options):
    """What the definition makes of NumPy arrays."""
    parameters, state = layer.to_numpy()
    return layer.definition(parameters, *inputs, **options, **({"state": state} if state else {}), xp=NUMPY.namespace)


def close(found, expected, tolerance):
    np.testing.assert_allclose(np.asarray(found, "float64"), np.asarray(expected, "float64"), rtol=0, atol=tolerance)


def same(found, expected):
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def alike(first, second):
    """Fail unless two trees of NumPy arrays are the same bit for bit."""
    first, second = named_arrays(first), named_arrays(second)
    assert list(first) == list(second)
    for name in first:
        assert first[name].dtype == second[name].dtype
        assert first[name].tobytes() == second[name].tobytes()


# What is computed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_layer_computes_its_definition_in_float64(rng, name, mode):
    layer, x = made(name, rng, "float64"), example(name, rng, "float64")
    found = compiled(layer, mode)(tf.constant(x))
    assert found.dtype == "float64"
    close(found, defined(layer, x), 1e-12)


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("name", CASES)
def test_sizes_may_be_unknown_while_a_graph_is_traced(rng, name, mode):
    layer, dims = made(name, rng), CASES[name][2]
    known = () if name == "embeddings" else dims[-1:]
    spec = tf.TensorSpec([None] * (len(dims) - len(known)) + [*known], tf.int32 if name == "embeddings" else tf.float32)
    function = tf.function(layer, input_signature=[spec], autograph=False, **MODES[mode])
    for more in (0, 2):
        x = example(
            name, rng, dims=(dims[0] + more, *(size + more for size in dims[1 : len(dims) - len(known)]), *known)
        )
        close(function(tf.constant(x)), layer(x), 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_shapes_are_told_before_the_call(rng, name):
    kind, settings, dims = CASES[name]
    unbuilt, x = kind(**settings), example(name, rng)
    expected = tuple(unbuilt(x).shape)
    assert kind(**settings).compute_output_shape(dims) == expected
    assert tuple(unbuilt(placeholder(name)).shape) == (*[None] * (len(expected) - 1), expected[-1])


def test_shapes_of_three_inputs_are_told_before_the_call():
    assert DotProductAttention().compute_output_shape((2, 5, 6), (2, 7, 6), (2, 7, 3)) == (2, 5, 3)
    shapes = {"query": (None, None, 6), "key": (None, 7, 5)}
    assert MultiHeadAttention(6, 2, key_channels=5, output=False).compute_output_shape(shapes) == (None, None, 6)


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_the_same_seed_gives_the_bits_that_the_definition_gives(name):
    kind, settings, _ = CASES[name]
    layer = kind(**settings, seed=2**63 + 5)
    definition = layer.definition
    alike(layer.to_numpy()[0], definition.init(2**63 + 5, xp=NUMPY.namespace))
    alike(layer.to_numpy()[1], definition.init_state(2**63 + 5, xp=NUMPY.namespace))


def test_without_a_seed_the_generator_of_keras_gives_one():
    def drawn():
        layer = FeedForward(4, 5, dropout=0.5)
        return layer.to_numpy()[0].expand.weight, np.asarray(layer(np.ones((3, 7, 4)), training=True))

    keras.utils.set_random_seed(7)
    weight, output = drawn()
    other, _ = drawn()
    keras.utils.set_random_seed(7)
    again, output_again = drawn()
    same(again, weight)
    same(output_again, output)
    assert not np.array_equal(other, weight)


@pytest.mark.parametrize("name", CASES)
def test_variables_have_the_names_of_the_tree_and_weights_are_in_out(name):
    kind, settings, _ = CASES[name]
    layer = kind(**settings)
    layer.build()
    wanted = {key: leaf.dims for key, leaf in named_arrays(layer.definition.parameters).items()}
    assert {each.name: tuple(each.shape) for each in layer.trainable_weights} == wanted
    wanted = {key: leaf.dims for key, leaf in named_arrays(layer.definition.state, "state").items()}
    assert {each.name: tuple(each.shape) for each in layer.non_trainable_weights} == wanted


def test_three_inputs_come_by_place_or_as_a_mapping(rng):
    layer = MultiHeadAttention(6, 2, key_channels=5, value_channels=3)
    query, key, value = (rng.standard_normal(dims).astype("float32") for dims in ((2, 4, 6), (2, 7, 5), (2, 7, 3)))
    expected = layer(query, key, value)
    close(expected, defined(layer, query, key, value), 1e-5)
    same(layer({"value": value, "query": query, "key": key}), expected)
    inputs = {name: keras.Input((None, size), name=name) for name, size in (("query", 6), ("key", 5), ("value", 3))}
    model = keras.Model(inputs, layer(inputs))
    close(model({"query": query, "key": key, "value": value}), expected, 1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_asked_for_is_returned_and_nothing_else(rng, mode):
    layer, x = made("multi_head", rng), example("multi_head", rng)
    expected = defined(layer, x, return_weights=True, return_logsumexp=True)
    for names in (("weights",), ("logsumexp",), ("weights", "logsumexp")):
        flags = {f"return_{name}": True for name in names}
        found = compiled(lambda x, flags=flags: layer(x, **flags), mode)(tf.constant(x))
        assert found._fields == ("output", *names)
        for name in found._fields:
            close(getattr(found, name), getattr(expected, name), 1e-5)
        inputs, alone = placeholder("multi_head"), made("multi_head", np.random.default_rng(0))
        alone.set_weights(layer.get_weights())  # to Keras, all calls of a layer have as many outputs as the first
        model = keras.Model(inputs, getattr(alone(inputs, **flags), names[-1]))
        close(model(x), getattr(expected, names[-1]), 1e-5)


def test_options_of_attention_reach_the_definition(rng):
    layer, x = made("multi_head", rng, "float64"), example("multi_head", rng, "float64")
    bias, allowed = rng.standard_normal((2, 5, 5)), rng.random((2, 1, 5, 5)) > 0.4
    found = layer(x, mask=allowed, bias=bias)
    close(found, defined(layer, x, mask=allowed, bias=bias), 1e-12)
    same(layer(x, attention_mask=allowed, bias=bias), found)
    close(layer(x, mask=Causal()), defined(layer, x, mask=Causal()), 1e-12)
    doubled = {"score_mod": lambda score, *_: score * 2.0, "prepare": lambda query, key: (query * 3.0, key)}
    close(layer(x, **doubled), defined(layer, x, **doubled), 1e-12)
    encoder = made("encoder", rng, "float64")
    close(encoder(x, mask=Causal()), defined(encoder, x, mask=Causal()), 1e-12)
    embeddings, ids = made("embeddings", rng, "float64", num_segments=3), example("embeddings", rng)
    places = {"position_ids": np.array([8, 0, 3, 3, 1]), "segment_ids": np.array([[2, 0, 1, 1, 0]])}
    close(embeddings(ids, **places), defined(embeddings, ids, **places), 1e-12)
    sagan, maps = made("sagan", rng, "float64"), example("sagan", rng, "float64")
    found, expected = sagan(maps, return_weights=True), defined(sagan, maps, return_weights=True)
    close(found.weights, expected.weights, 1e-12)
    close(found.output, expected.output, 1e-12)


# Keras's masks

PLACES = np.array([[True, True, True, False, False], [True, True, True, True, True]])


def masked(x, places):
    tensor = tf.constant(x)
    tensor._keras_mask = tf.constant(places)
    return tensor


@pytest.mark.parametrize("mode", MODES)
def test_an_embedding_that_masks_zero_hides_the_padding_from_the_encoder(rng, mode):
    tokens = np.array([[3, 1, 4, 0, 0], [9, 2, 6, 5, 3]])
    encoder = made("encoder", rng)
    model = keras.Sequential([keras.layers.Embedding(10, 6, mask_zero=True), encoder])
    found = np.asarray(compiled(model, mode)(tf.constant(tokens)))
    alone = np.asarray(model(tokens[:1, :3]))
    close(found[0, :3], alone[0], 1e-5)
    vectors = np.asarray(model.layers[0](tokens))
    close(found, defined(encoder, vectors, key_mask=tokens != 0), 1e-5)
    assert np.abs(found - defined(encoder, vectors)).max() > 1e-3


def test_functional_models_carry_masks_on(rng):
    tokens = np.array([[3, 1, 4, 0, 0], [9, 2, 6, 5, 3]])
    inputs = keras.Input((None,), dtype="int32")
    vectors = keras.layers.Embedding(10, 6, mask_zero=True)(inputs)
    first, second, feed = made("encoder", rng), made("multi_head", rng), made("feed_forward", rng)
    model = keras.Model(inputs, [vectors, feed(second(first(vectors)))])
    start, found = model(tokens)
    same(found._keras_mask, tokens != 0)
    middle = defined(first, np.asarray(start), key_mask=tokens != 0)
    middle = defined(second, middle, query_mask=tokens != 0, key_mask=tokens != 0)
    close(found, defined(feed, middle), 1e-4)


@pytest.mark.parametrize("form", ["places", "mapping"])
@pytest.mark.parametrize("name", ["dot_product", "multi_head"])
def test_masks_of_query_key_and_value_hide_places(rng, name, form):
    layer, (query, key, value) = made(name, rng), (example(name, rng) for _ in range(3))
    of_query, of_key, of_value = (rng.random((2, 5)) > 0.3 for _ in range(3))
    of_query[0, 0] = False
    inputs = masked(query, of_query), masked(key, of_key), masked(value, of_value)
    found = layer(*inputs) if form == "places" else layer(dict(zip(("query", "key", "value"), inputs, strict=True)))
    close(found, defined(layer, query, key, value, query_mask=of_query, key_mask=of_key & of_value), 1e-5)
    same(found._keras_mask, of_query)
    bias = 0.0 if name == "dot_product" else layer.to_numpy()[0].output.bias
    same(np.asarray(found)[~of_query], np.broadcast_to(bias, (np.sum(~of_query), 6)))


@pytest.mark.parametrize("name", ["dot_product", "multi_head"])
def test_a_given_mask_takes_the_place_of_that_of_the_input(rng, name):
    layer, x = made(name, rng), example(name, rng)
    allowed, padding = rng.random((2, 1, 5, 5)) > 0.4, rng.random((2, 5)) > 0.3
    if name == "dot_product":
        allowed = allowed[:, 0]
    found = layer(masked(x, PLACES), mask=allowed, key_mask=padding)
    close(found, defined(layer, x, mask=allowed, query_mask=PLACES, key_mask=padding), 1e-5)
    same(found._keras_mask, PLACES)
    found = layer(masked(x, PLACES), query_mask=padding, return_weights=True)
    close(found.output, defined(layer, x, query_mask=padding, key_mask=PLACES), 1e-5)


def test_a_mask_and_its_other_name_are_an_error(rng):
    x, allowed = example("multi_head", rng), np.ones((5, 5), bool)
    with pytest.raises(TypeError, match="got both"):
        made("multi_head", rng)(x, mask=allowed, attention_mask=allowed)


@pytest.mark.parametrize("name", ["feed_forward", "embeddings"])
def test_layers_without_attention_pass_the_mask_on(rng, name):
    layer, x = made(name, rng), example(name, rng)
    found = layer(masked(x, PLACES))
    same(found._keras_mask, PLACES)
    same(found, layer(x))


def test_a_mask_over_feature_maps_is_not_lost_in_silence(rng):
    with pytest.warns(UserWarning, match="does not support masking"):
        made("sagan", rng)(masked(example("sagan", rng), np.ones((2, 4, 6), bool)))


# Training


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_gradients_are_those_of_finite_differences(rng, name, mode):
    layer, x = (
        made(name, rng, "float64", **({} if name == "sagan" else {"dropout": 0.25})),
        example(name, rng, "float64"),
    )
    factor = rng.standard_normal(tuple(layer(x).shape))
    options = {} if name == "sagan" else {"seed": 11}
    state = [each.numpy() for each in layer.non_trainable_weights]

    def loss():
        for variable, value in zip(layer.non_trainable_weights, state, strict=True):
            variable.assign(value)
        return tf.reduce_sum(layer(tf.constant(x), training=True, **options) * factor)

    def differentiated():
        with tf.GradientTape() as tape:
            value = loss()
        return [
            tf.convert_to_tensor(each)
            for each in tape.gradient(value, [each.value for each in layer.trainable_weights])
        ]

    gradients = compiled(differentiated, mode)()
    value = compiled(loss, "graph")
    for variable, gradient in zip(layer.trainable_weights, gradients, strict=True):
        start, gradient = variable.numpy(), np.asarray(gradient)
        if variable.name not in UNFELT:
            assert np.abs(gradient).max() > 1e-9
        for index in rng.permutation(start.size)[:6]:
            step = np.zeros(start.size)
            step[index] = 1e-5
            ends = []
            for sign in (1, -1):
                variable.assign(start + sign * step.reshape(start.shape))
                ends.append(float(value()))
            variable.assign(start)
            close(gradient.reshape(-1)[index], (ends[0] - ends[1]) / 2e-5, 1e-7 * max(1, np.abs(gradient).max()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_is_fresh_in_training_and_absent_otherwise(rng, name, mode):
    layer, x = made(name, rng), tf.constant(example(name, rng))
    trained = compiled(lambda x: layer(x, training=True), mode)
    first, second = np.asarray(trained(x)), np.asarray(trained(x))
    assert not np.array_equal(first, second)
    evaluated = compiled(lambda x: layer(x, training=False, seed=3), mode)(x)
    same(evaluated, compiled(layer, mode)(x))
    close(evaluated, defined(layer, np.asarray(x)), 1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_a_given_seed_drops_what_the_definition_drops(rng, name, mode):
    layer, x = made(name, rng, "float64"), example(name, rng, "float64")
    found = compiled(lambda x: layer(x, training=True, seed=2**40 + 9), mode)(tf.constant(x))
    close(found, defined(layer, x, seed=2**40 + 9), 1e-12)
    words = compiled(lambda x, seed: layer(x, training=True, seed=seed), mode)(tf.constant(x), tf.constant([9, 2**8]))
    same(words, found)


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_the_seed_of_a_layer_gives_the_same_run_of_dropouts(rng, name):
    kind, settings, _ = CASES[name]
    x = example(name, rng)
    runs = []
    for _ in range(2):
        layer = kind(**settings, seed=2**63 + 4)
        runs.append([np.asarray(layer(x, training=True)) for _ in range(3)])
    same(*runs)


def test_a_layer_without_dropout_draws_no_seed(rng):
    layer = made("encoder", rng, dropout=0.0)
    assert len(layer.variables) == len(layer.weights)
    x = example("encoder", rng)
    same(layer(x, training=True), layer(x))


@pytest.mark.parametrize("mode", MODES)
def test_spectral_vectors_advance_in_training_only(rng, mode):
    layer, x = made("sagan", rng), tf.constant(example("sagan", rng))
    parameters, state = layer.to_numpy()
    compiled(layer, mode)(x)
    alike(layer.to_numpy()[1], state)
    trained = compiled(lambda x: layer(x, training=True), mode)
    first = trained(x)
    close(first, layer.definition(parameters, x.numpy(), state=state, xp=NUMPY.namespace), 1e-5)
    trained(x)
    twice = layer.definition.refreshed(parameters, layer.definition.refreshed(parameters, state))
    for name, array in named_arrays(layer.to_numpy()[1]).items():
        close(array, named_arrays(twice)[name], 1e-5)
        assert np.abs(array - named_arrays(state)[name]).max() > 1e-3


@pytest.mark.parametrize(("name", "jit"), [*((name, False) for name in CASES), ("encoder", True), ("sagan", True)])
def test_fit_trains_every_weight(rng, name, jit):
    layer, x = made(name, rng), example(name, rng, dims=(6, *CASES[name][2][1:]))
    before = layer.to_numpy()
    model = keras.Sequential([placeholder(name), layer, keras.layers.Dense(3)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", jit_compile=jit)
    y = np.asarray(rng.standard_normal(model(x).shape), "float32")
    losses = model.fit(x, y, batch_size=4, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    for old, new in zip(before, layer.to_numpy(), strict=True):
        for key, array in named_arrays(new).items():
            assert np.isfinite(array).all()
            if key not in UNFELT:
                assert not np.array_equal(array, named_arrays(old)[key]), key


def test_frozen_layers_are_not_trained(rng):
    layer = made("encoder", rng)
    layer.trainable = False
    assert not layer.trainable_weights
    assert layer(example("encoder", rng)).shape == (2, 5, 6)


# Precision


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("name", CASES)
def test_mixed_precision_computes_on_bfloat16_and_keeps_float32(rng, name, mode):
    kind, settings, _ = CASES[name]
    definition = kind.kind(**settings)
    layer = kind.from_numpy(definition, *perturbed(definition, rng), dtype="mixed_bfloat16")
    assert {str(each.dtype) for each in layer.weights} <= {"float32"}
    x = example(name, rng)

    def trained(x):
        with tf.GradientTape() as tape:
            y = layer(x, training=True)
            value = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
        return y, tape.gradient(value, [each.value for each in layer.trainable_weights])

    y, gradients = compiled(trained, mode)(tf.constant(x))
    assert y.dtype == "bfloat16"
    for gradient in gradients:
        assert gradient.dtype == "float32"
        assert np.isfinite(np.asarray(tf.convert_to_tensor(gradient))).all()

    def rounded(array):
        return np.asarray(tf.cast(tf.cast(array, tf.bfloat16), tf.float64)) if array.dtype == "float32" else array

    exact, state = ({key: rounded(leaf) for key, leaf in named_arrays(tree).items()} for tree in layer.to_numpy())
    parameters = tree_from_names(definition.parameters, exact)
    options = {"state": tree_from_names(definition.state, state)} if state else {}
    expected = definition(parameters, rounded(x), **options, xp=NUMPY.namespace)
    found = np.asarray(tf.cast(compiled(layer, mode)(tf.constant(x)), tf.float64))
    np.testing.assert_allclose(found, expected, rtol=2**-8, atol=1e-4)  # rounded once


@pytest.mark.parametrize("policy", ["float64", "mixed_bfloat16", "bfloat16"])
def test_the_policy_of_keras_governs_models(rng, policy):
    keras.config.set_dtype_policy(policy)
    try:
        layers_ = [keras.Input((None,), dtype="int32"), Embeddings(11, 9, 6), EncoderLayer(6, 2, 7), FeedForward(6, 5)]
        model = keras.Sequential(layers_)
        assert model(example("embeddings", rng)).dtype == model.layers[0].compute_dtype
        assert {str(each.dtype) for each in model.weights} == {keras.config.dtype_policy().variable_dtype}
    finally:
        keras.config.set_dtype_policy("float32")


# Saving


@pytest.mark.parametrize("name", CASES)
def test_a_model_in_a_file_of_keras_gives_the_same_bits(rng, name, tmp_path):
    layer, x, inputs = made(name, rng), example(name, rng), placeholder(name)
    model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again.layers[-1]) is type(layer)
    alike(again.layers[-1].to_numpy()[0], layer.to_numpy()[0])
    alike(again.layers[-1].to_numpy()[1], layer.to_numpy()[1])
    same(again.predict(x, verbose=0), model.predict(x, verbose=0))


@pytest.mark.parametrize("form", ["saved_model", "export"])
@pytest.mark.parametrize("name", CASES)
def test_a_saved_model_of_tensorflow_gives_the_same_bits(rng, name, form, tmp_path):
    layer, x, inputs = made(name, rng), example(name, rng), placeholder(name)
    model = keras.Model(inputs, layer(inputs))
    if form == "export":
        model.export(tmp_path / "model", verbose=False)
        again = tf.saved_model.load(str(tmp_path / "model"))
        found = again.serve(tf.constant(x))
    else:
        tf.saved_model.save(model, str(tmp_path / "model"))
        again = tf.saved_model.load(str(tmp_path / "model"))
        (found,) = again.signatures["serving_default"](tf.constant(x)).values()
    spec = [tf.TensorSpec(inputs.shape, inputs.dtype)]
    same(found, tf.function(model, input_signature=spec, autograph=False)(tf.constant(x)))


@pytest.mark.parametrize("name", CASES)
def test_weights_are_read_and_set_in_the_order_of_their_names(rng, name):
    kind, settings, _ = CASES[name]
    layer, x, other = made(name, rng), example(name, rng), kind(**settings)
    other.build()
    other.set_weights(layer.get_weights())
    same(other(x), layer(x))
    arrays = [array for tree in layer.to_numpy() for array in named_arrays(tree).values()]
    for found, expected in zip(layer.get_weights(), arrays, strict=True):
        same(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_made_again_from_its_config(name):
    kind, settings, _ = CASES[name]
    for more in ({}, {"seed": 5, "name": "mine", "trainable": False, "dtype": "mixed_bfloat16"}):
        layer = kind(**settings, **more)
        again = kind.from_config(layer.get_config())
        assert again.definition == layer.definition == kind.kind(**settings)
        assert again.get_config() == layer.get_config()
        if more:
            alike(again.to_numpy()[0], layer.to_numpy()[0])


def test_weights_in_a_file_of_keras_fit_a_model_made_anew(rng, tmp_path):
    def model(encoder):
        return keras.Sequential([keras.Input((None, 6)), encoder, keras.layers.Dense(2)])

    first, x = model(made("encoder", rng)), example("encoder", rng)
    first.save_weights(tmp_path / "model.weights.h5")
    second = model(EncoderLayer(6, 2, 7, dropout=0.25))
    second.load_weights(tmp_path / "model.weights.h5")
    same(second(x), first(x))
    third = keras.models.clone_model(first)
    third.set_weights(first.get_weights())
    same(third(x), first(x))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_arrays_come_back_bit_for_bit(rng, name, dtype):
    kind, settings, _ = CASES[name]
    definition = kind.kind(**settings)
    trees = [
        tree_from_names(tree, {key: NUMPY.from_numpy(array, dtype=dtype) for key, array in named_arrays(tree).items()})
        for tree in perturbed(definition, rng)
    ]
    for base in (Layer, kind):
        layer = base.from_numpy(definition, *trees, device="CPU:0")
        assert type(layer) is kind
        assert layer.definition == definition
        for found, expected in zip(layer.to_numpy(), trees, strict=True):
            assert type(found) is type(expected)
            alike(found, expected)


def test_arrays_that_do_not_fit_are_named(rng):
    definition = layers.FeedForward(4, 5)
    parameters, _ = perturbed(definition, rng)
    with pytest.raises(TypeError, match="MultiHeadAttention; got FeedForward"):
        MultiHeadAttention.from_numpy(definition, parameters)
    with pytest.raises(ValueError, match="weight"):
        FeedForward.from_numpy(layers.FeedForward(4, 6), parameters)
    with pytest.raises(TypeError, match="state"):
        Layer.from_numpy(definition, parameters, parameters)
    with pytest.raises(ValueError, match="got 'moon'"):
        Layer.from_numpy(definition, parameters, device="moon")
    mixed = parameters._replace(contract=perturbed(definition, rng, "float64")[0].contract)
    with pytest.raises(ValueError, match="float32, float64"):
        Layer.from_numpy(definition, mixed)
    assert {str(each.dtype) for each in Layer.from_numpy(definition, mixed, dtype="float64").weights} == {"float64"}


@pytest.mark.parametrize("name", CASES)
def test_a_file_gives_the_layer_back_bit_for_bit(rng, name, tmp_path):
    layer = made(name, rng)
    save(layer, tmp_path / "layer.safetensors")
    again = load(tmp_path / "layer.safetensors")
    assert type(again) is type(layer)
    assert again.definition == layer.definition
    for found, expected in zip(again.to_numpy(), layer.to_numpy(), strict=True):
        alike(found, expected)
    x = example(name, rng)
    same(again(x), layer(x))
    assert load(tmp_path / "layer.safetensors", dtype="mixed_bfloat16").compute_dtype == "bfloat16"


# Being a layer of Keras


@pytest.mark.parametrize("name", CASES)
def test_the_constructor_shows_the_settings(name):
    kind = CASES[name][0]
    shown = list(inspect.signature(kind).parameters)
    assert shown == [*(field.name for field in dataclasses.fields(kind.kind)), "seed", "kwargs"]
    assert kind.__name__ == kind.kind.__name__
    assert kind.__name__ in attention_tensorflow.__all__
    assert getattr(attention_tensorflow, kind.__name__) is kind
    assert kind in (keras.saving.get_registered_object(f"attention_core>{kind.__name__}"),)


def test_settings_come_by_place_and_wrong_ones_are_named():
    assert MultiHeadAttention(6, 2, 1).definition == layers.MultiHeadAttention(6, 2, num_key_value_heads=1)
    with pytest.raises(ValueError, match="6 heads share out evenly; got 8 channels"):
        MultiHeadAttention(8, 6)
    with pytest.raises(ValueError, match="expected a seed"):
        FeedForward(4, 5, seed=-1)
    with pytest.raises(ValueError, match="colour"):
        FeedForward(4, 5, colour="red")
    with pytest.raises(TypeError, match="multiple values"):
        FeedForward(4, 5, inner=6)


@pytest.mark.parametrize("name", ["encoder", "sagan"])
def test_a_class_derived_from_a_layer_may_have_layers_of_its_own(rng, name):
    kind, settings, _ = CASES[name]

    class Derived(kind):
        def __init__(self, factor, **options):
            super().__init__(**options)
            self.factor = factor
            self.inner = kind(**settings, seed=1)

        def call(self, x, training=None):
            return super().call(self.inner(x, training=training), training=training) * self.factor

    assert list(inspect.signature(Derived).parameters) == ["factor", "options"]
    x, layer = example(name, rng), Derived(2.0, **settings, seed=0)
    close(layer(x), 2.0 * np.asarray(kind(**settings, seed=0)(kind(**settings, seed=1)(x))), 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_may_be_built_where_a_model_is_traced(rng, name):
    kind, settings, _ = CASES[name]

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = kind(**settings, seed=4)

        def call(self, x, training=None):
            return self.layer(x, training=training)

    x, expected = example(name, rng), kind(**settings, seed=4)(example(name, rng)).shape
    outer = Model()
    inputs = placeholder(name)
    model = keras.Model(inputs, outer(inputs))
    assert model(x).shape == expected
    same(model(x), kind(**settings, seed=4)(x))
    traced = kind(**settings, seed=4)
    same(tf.function(traced)(tf.constant(x)), tf.function(kind(**settings, seed=4))(tf.constant(x)))


@pytest.mark.parametrize("name", CASES)
def test_a_copy_is_a_layer_of_its_own(rng, name):
    layer, x = made(name, rng), example(name, rng)
    again = copy.deepcopy(layer)
    same(again(x), layer(x))
    for variable in again.weights:
        variable.assign(variable + 1)
    for found, expected in zip(again.get_weights(), layer.get_weights(), strict=True):
        assert not np.array_equal(found, expected)


def in_a_process_of_its_own(code, backend):
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_backend_is_imported_without_the_layers():
    code = "import sys, attention_tensorflow; attention_tensorflow.backend; assert 'attention_tensorflow.layers' not in sys.modules"
    in_a_process_of_its_own(code, "tensorflow")


def test_keras_on_another_library_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match=r"expected Keras on TensorFlow.*got Keras on jax"):
        attention_tensorflow.FeedForward(4, 5)


def test_examples_of_the_docstrings_run():
    found = doctest.testmod(importlib.import_module("attention_tensorflow.layers"))
    assert found.attempted > 0
    assert found.failed == 0
