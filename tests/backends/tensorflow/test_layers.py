"""The layers as layers of Keras on TensorFlow: trained, masked, compiled, saved, and equal to their definitions."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_helpers import CASES, MODES, OF_TOKENS, close, compiled, example, made, placeholder, same
from layer_helpers import NUMPY

import attention_models as models
from attention_keras.layers import FeedForward, MultiHeadAttention

WITH_DROPOUT = [name for name in CASES if name != "sagan"]

# So TensorFlow's variables answer when Keras writes them to its files.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)


def defined(layer, *inputs, **options):
    """What the definition makes of NumPy arrays."""
    parameters, state = layer.to_numpy()
    return layer.definition(parameters, *inputs, **options, **({"state": state} if state else {}), xp=NUMPY.namespace)


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("name", CASES)
def test_sizes_may_be_unknown_while_a_graph_is_traced(rng, name, mode):
    layer, dims = made(name, rng), CASES[name][2]
    known = () if name in OF_TOKENS else dims[-1:]
    spec = tf.TensorSpec([None] * (len(dims) - len(known)) + [*known], tf.int32 if name in OF_TOKENS else tf.float32)
    function = tf.function(layer, input_signature=[spec], **MODES[mode])
    for more in (0, 2):
        x = example(
            name, rng, dims=(dims[0] + more, *(size + more for size in dims[1 : len(dims) - len(known)]), *known)
        )
        close(function(tf.constant(x)), defined(layer, x), 1e-5)


def test_a_module_may_hold_the_parameters_of_a_decoder():
    """TensorFlow wraps tuples that are attributes of a module."""
    definition = models.Decoder(9, 8, 2, 8, num_layers=2)
    module, parameters = tf.Module(), definition.init(0, xp=NUMPY.namespace)
    module.parameters = tf.nest.map_structure(lambda x: None if x is None else tf.Variable(x), parameters)
    ids = np.asarray([[1, 2]])
    close(definition(module.parameters, tf.constant(ids)), definition(parameters, ids), 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_shapes_are_told_before_the_call(rng, name):
    kind, settings, dims = CASES[name]
    unbuilt, x = kind(**settings), example(name, rng)
    expected = tuple(unbuilt(x).shape)
    assert kind(**settings).compute_output_shape(dims) == expected
    assert tuple(unbuilt(placeholder(name)).shape) == (*[None] * (len(expected) - 1), expected[-1])


def test_shapes_of_three_inputs_are_told_before_the_call():
    assert MultiHeadAttention(6, 2, value_channels=3).compute_output_shape((2, 5, 6), (2, 7, 6), (2, 7, 3)) == (2, 5, 6)
    shapes = (None, None, 6), (None, 7, 5)
    assert MultiHeadAttention(6, 2, key_channels=5, output=False).compute_output_shape(*shapes) == (None, None, 6)


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


@pytest.mark.parametrize("mode", ["eager", "xla"])
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


def test_a_mask_goes_by_the_name_of_keras_too(rng):
    layer, x = made("multi_head", rng, "float64"), example("multi_head", rng, "float64")
    bias, allowed = rng.standard_normal((2, 5, 5)), rng.random((2, 1, 5, 5)) > 0.4
    found = layer(x, mask=allowed, bias=bias)
    close(found, defined(layer, x, mask=allowed, bias=bias), 1e-12)
    same(layer(x, attention_mask=allowed, bias=bias), found)
    same(layer(x, attention_mask=allowed[:, 0], bias=bias), found)  # of samples, which are as many as heads
    with pytest.raises(TypeError):
        layer(x, mask=allowed, attention_mask=allowed)


PLACES = np.array([[True, True, True, False, False], [True, True, True, True, True]])


def masked(x, places):
    tensor = tf.constant(x)
    tensor._keras_mask = tf.constant(places)
    return tensor


def test_masks_of_query_key_and_value_hide_places(rng):
    layer, (query, key, value) = made("multi_head", rng), (example("multi_head", rng) for _ in range(3))
    of_query, of_key, of_value = (rng.random((2, 5)) > 0.3 for _ in range(3))
    of_query[0, 0] = of_value[1, 2] = False
    of_key[1, 2] = True
    inputs = masked(query, of_query), masked(key, of_key), masked(value, of_value)
    found = layer(*inputs)
    close(found, defined(layer, query, key, value, query_mask=of_query, key_mask=of_key & of_value), 1e-5)
    same(found._keras_mask, of_query)
    same(np.asarray(found)[~of_query], np.broadcast_to(layer.to_numpy()[0].output.bias, (np.sum(~of_query), 6)))


def test_a_given_mask_takes_the_place_of_that_of_the_input(rng):
    layer, x = made("multi_head", rng), example("multi_head", rng)
    allowed, padding = rng.random((2, 1, 5, 5)) > 0.4, rng.random((2, 5)) > 0.3
    found = layer(masked(x, PLACES), mask=allowed, key_mask=padding)
    close(found, defined(layer, x, mask=allowed, query_mask=PLACES, key_mask=padding), 1e-5)
    same(found._keras_mask, PLACES)
    found = layer(masked(x, PLACES), query_mask=padding, return_weights=True)
    close(found.output, defined(layer, x, query_mask=padding, key_mask=PLACES), 1e-5)


@pytest.mark.parametrize("name", ["feed_forward", "embeddings"])
def test_layers_without_attention_pass_the_mask_on(rng, name):
    layer, x = made(name, rng), example(name, rng)
    found = layer(masked(x, PLACES))
    same(found._keras_mask, PLACES)
    same(found, layer(x))


def test_a_mask_over_feature_maps_is_not_lost_in_silence(rng):
    with pytest.warns(UserWarning, match="does not support masking"):
        made("sagan", rng)(masked(example("sagan", rng), np.ones((2, 4, 6), bool)))


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "eager") for name in WITH_DROPOUT), ("decoder", "graph"), ("encoder", "xla")]
)
def test_dropout_is_fresh_in_training_and_that_of_the_definition_by_a_seed(rng, name, mode):
    layer, x = made(name, rng), example(name, rng)

    @functools.partial(compiled, mode=mode)
    def run(x, seed):
        fresh, dropped = layer(x, training=True), layer(x, training=True, seed=seed)
        return fresh, dropped, layer(x, training=False, seed=seed), layer(x)

    first, second = ([np.asarray(each) for each in run(tf.constant(x), tf.constant([9, 2**8]))] for _ in range(2))
    assert not np.array_equal(first[0], second[0])
    close(first[1], defined(layer, x, seed=2**40 + 9), 1e-5)
    same(first[1], second[1])
    same(first[2], first[3])
    close(first[2], defined(layer, x), 1e-5)


def test_a_layer_without_dropout_draws_no_seed(rng):
    layer = made("encoder", rng, dropout=0.0)
    assert len(layer.variables) == len(layer.weights)
    x = example("encoder", rng)
    same(layer(x, training=True), layer(x))


def test_training_is_true_or_false(rng):
    layer, x = made("encoder", rng), example("encoder", rng)
    for wrong in ("no", np.True_, float("nan")):
        with pytest.raises(TypeError):
            layer(x, training=wrong)
