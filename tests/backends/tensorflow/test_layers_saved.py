"""Layers of Keras in other precisions, as files, and as Keras expects layers to be."""

import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_helpers import CASES, close, compiled, example, made, placeholder, same
from layer_helpers import NUMPY, alike, perturbed

from attention_core.layers import named_arrays
from attention_keras.layers import (
    Embeddings,
    EncoderLayer,
    FeedForward,
)

# So TensorFlow's variables answer when Keras writes them to its files.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)


@pytest.mark.parametrize(("name", "mode"), [*((name, "eager") for name in CASES), ("encoder", "graph")])
def test_mixed_precision_computes_as_a_layer_of_bfloat16_and_keeps_float32(rng, name, mode):
    narrow, x = made(name, rng, "bfloat16"), example(name, rng, "bfloat16")
    layer = type(narrow).from_numpy(narrow.definition, *perturbed(narrow.definition), dtype="mixed_bfloat16")
    assert {str(each.dtype) for each in layer.weights} <= {"float32"}

    def trained(layer, x):
        with tf.GradientTape() as tape:
            y = layer(x, training=True, **({} if name == "sagan" else {"seed": 3}))
            value = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
        return y, tape.gradient(value, [each.value for each in layer.trainable_weights])

    before = layer.to_numpy()
    (y, gradients), (expected, others) = (
        compiled(functools.partial(trained, each), mode)(x) for each in (layer, narrow)
    )
    assert y.dtype == "bfloat16"
    same(y, expected)
    if before[1]:
        advanced = named_arrays(layer.definition.updated_state(*before, xp=NUMPY.namespace))
        for key, leaf in named_arrays(layer.to_numpy()[1]).items():
            np.testing.assert_allclose(leaf, advanced[key], rtol=1e-5)
    for gradient, other in zip(gradients, others, strict=True):
        gradient, other = tf.convert_to_tensor(gradient), tf.convert_to_tensor(other)
        assert gradient.dtype == "float32"
        close(gradient, other, 2**-7 * float(tf.reduce_max(tf.abs(gradient))))


@pytest.mark.parametrize("policy", ["float64", "bfloat16"])
def test_the_policy_of_keras_governs_models(rng, policy):
    keras.config.set_dtype_policy(policy)
    try:
        layers_ = [keras.Input((None,), dtype="int32"), Embeddings(11, 9, 6), EncoderLayer(6, 2, 7), FeedForward(6, 5)]
        model = keras.Sequential(layers_)
        assert model(example("embeddings", rng)).dtype == model.layers[0].compute_dtype
        assert {str(each.dtype) for each in model.weights} == {keras.config.dtype_policy().variable_dtype}
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("name", CASES)
def test_a_model_in_a_file_of_keras_gives_the_same_bits(rng, name, tmp_path):
    layer, x, inputs = made(name, rng), example(name, rng), placeholder(name)
    model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again.layers[-1]) is type(layer)
    seeded = type(layer)(**CASES[name][1], seed=5, name="mine", trainable=False)
    copy = type(layer).from_config(seeded.get_config())
    assert copy.get_config() == seeded.get_config()
    alike(copy.to_numpy()[:1], seeded.to_numpy()[:1])
    other = type(layer)(**CASES[name][1])
    other.build()
    other.set_weights(layer.get_weights())
    for each in (again.layers[-1], other):
        alike(each.to_numpy(), layer.to_numpy())
    arrays = [array for tree in layer.to_numpy() for array in named_arrays(tree).values()]
    for found, expected in zip(layer.get_weights(), arrays, strict=True):  # in the order of their names
        same(found, expected)
    same(again.predict(x, verbose=0), model.predict(x, verbose=0))


@pytest.mark.parametrize(
    ("name", "form"),
    [("multi_head", "export"), ("embeddings", "export"), ("decoder", "saved_model"), ("sagan", "saved_model")],
)
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
    same(found, tf.function(model, input_signature=spec)(tf.constant(x)))


@pytest.mark.parametrize("name", ["sagan"])
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


@pytest.mark.parametrize("name", ["encoder", "embeddings", "sagan"])
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
