"""Layers of Keras on the library of ``KERAS_BACKEND``: ``python keras_check.py WHAT SAVED [OTHER ...]``.

Run in a process of its own, as Keras chooses its library once. WHAT is "layers" or "files", SAVED is where a model
goes, and each OTHER is one that a library saved. It prints numbers as JSON.
"""

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path

import keras
import numpy as np

BEFORE = {name for name in ("tensorflow", "jax", "torch") if name in sys.modules}

import attention_core  # noqa: E402 (they are imported after what is counted)
import attention_keras as ak  # noqa: E402
import attention_view  # noqa: E402

LIBRARY = os.environ["KERAS_BACKEND"]
LOADED = {name for name in ("tensorflow", "jax", "torch") if name in sys.modules} - BEFORE
ADAPTERS = [name for name in ("tensorflow", "jax", "torch") if f"attention_{name}" in sys.modules]
WHAT, SAVED, *OTHERS = sys.argv[1:]

TOKENS = np.array([[3, 1, 4, 0], [5, 2, 0, 0]], "int32")
POINTS = np.linspace(-1, 1, 80, dtype="float32").reshape(2, 5, 8)


def array(x):
    return np.asarray(keras.ops.convert_to_numpy(x))


def digest(*arrays):
    return hashlib.sha256(b"".join(np.ascontiguousarray(array(x)).tobytes() for x in arrays)).hexdigest()[:16]


def functional(arithmetic="fast"):
    """A model with padding and two layers of attention.

    On PyTorch, Keras tries sizes that are open with 83 samples, which reproducible arithmetic takes one by one.
    """
    sizes = {"shape": (None,)} if arithmetic == "fast" else {"batch_shape": TOKENS.shape}
    tokens = keras.Input(**sizes, dtype="int32")
    x = keras.layers.Embedding(9, 8, mask_zero=True)(tokens)
    x = ak.EncoderLayer(8, 2, 12, dropout=0.25, seed=2, arithmetic=arithmetic)(x)
    return keras.Model(tokens, ak.MultiHeadAttention(8, 2, is_causal=True, seed=3, arithmetic=arithmetic)(x))


def masked():
    """Padding hides nothing else: a longer row with padding gives the same numbers."""
    table = keras.layers.Embedding(9, 8, mask_zero=True)
    for layer in (ak.EncoderLayer(8, 2, 12, seed=1), ak.MultiHeadAttention(8, 2, seed=1)):
        model = keras.Sequential([table, layer])
        long, short = array(model(TOKENS))[1, :2], array(model(TOKENS[1:, :2]))[0]
        np.testing.assert_allclose(long, short, atol=1e-5)
        assert layer.supports_masking
    layer, x = ak.DecoderLayer(8, 2, 12, memory_channels=8, seed=1), table(TOKENS[:, :2])
    alone = [layer(x[:1], memory=table(TOKENS[:1])), layer(x[1:], memory=table(TOKENS[1:, :2]))]
    np.testing.assert_allclose(array(layer(x, memory=table(TOKENS))), np.concatenate([*map(array, alone)]), atol=1e-5)
    pairs = np.tri(2, TOKENS.shape[1], dtype=bool)
    pairs = np.stack([pairs, ~pairs])
    found = layer(x, memory=table(TOKENS), memory_mask=pairs)  # one for each sample
    expected = layer(x, memory=table(TOKENS), memory_mask=pairs[:, None])
    np.testing.assert_array_equal(array(found), array(expected))


def trained():
    """Training moves every weight, advances the seeds, and gives finite losses; Keras's stateless call is the same."""
    model = functional()
    model.compile("sgd", "mse", jit_compile=LIBRARY == "jax")
    before = [array(each) for each in model.trainable_variables]
    loss = model.fit(TOKENS, np.ones((2, 4, 8), "float32"), verbose=0, epochs=2).history["loss"]
    assert np.isfinite(loss).all()
    moved = [not np.array_equal(array(each), old) for each, old in zip(model.trainable_variables, before, strict=True)]
    assert sum(moved) > len(moved) / 2
    layer = ak.SaganAttention(8, seed=1)
    layer.build()
    x = keras.ops.reshape(POINTS[:, :4], (2, 2, 2, 8))
    maps = keras.Sequential([ak.SaganAttention(8, seed=1)])  # whose state moves while gradients need it
    maps.compile("sgd", "mse", jit_compile=LIBRARY == "jax")
    assert np.isfinite(maps.fit(array(x), array(x), verbose=0, epochs=2).history["loss"]).all()
    trainable, fixed = (
        [each.value for each in group] for group in (layer.trainable_variables, layer.non_trainable_variables)
    )
    expected, state = layer.stateless_call(trainable, fixed, x, training=True)
    assert all(
        np.array_equal(array(old), array(each.value))
        for old, each in zip(fixed, layer.non_trainable_variables, strict=True)
    )
    assert any(not np.array_equal(array(old), array(new)) for old, new in zip(fixed, state, strict=True))
    np.testing.assert_array_equal(array(layer(x, training=True)), array(expected))
    for each, new in zip(layer.non_trainable_variables, state, strict=True):
        np.testing.assert_array_equal(array(each.value), array(new))


def configured():
    """A layer is made again of its config, computes under a policy, and tells shapes and dtypes of symbols."""
    for kind, settings in (
        (ak.EncoderLayer, (8, 2, 12)),
        (ak.DecoderLayer, (8, 2, 12)),
        (ak.FeedForward, (8, 12)),
        (ak.MultiHeadAttention, (8, 2)),
    ):
        layer = kind(*settings, dropout=0.5, seed=4, dtype="mixed_bfloat16")
        again = kind.from_config(layer.get_config())
        assert again.get_config() == layer.get_config()
        output, spec = layer(POINTS), layer(keras.Input((5, 8)))
        assert digest(*again.weights or again.build() or again.weights) == digest(*layer.weights)
        assert {keras.backend.standardize_dtype(each.dtype) for each in layer.weights} <= {"float32"}
        assert spec.shape == (None, 5, 8)
        assert keras.backend.standardize_dtype(output.dtype) == spec.dtype == "bfloat16"
        assert layer.to_numpy()[0]._fields
    model, ids = importlib.import_module("attention_models.keras").Decoder(9, 8, 2, 12, 1, seed=1), TOKENS[:, :3]
    cache = model.definition.empty_cache((2,), 3, xp=ak.backend.namespace)
    parts = [model(ids[:, :1], cache=cache)]
    parts.append(model(ids[:, 1:], cache=parts[0][1]))
    found = np.concatenate([array(logits) for logits, _ in parts], axis=1)
    np.testing.assert_allclose(found, array(model(ids)), atol=1e-6)
    attend, each = ak.MultiHeadAttention(8, 2, seed=1), np.stack([np.tri(5, dtype=bool), np.eye(5, dtype=bool)])
    expected = array(attend(POINTS, attention_mask=each[:, None]))  # for each sample, as Keras reads two of two heads
    for name in ("attention_mask", "mask"):
        np.testing.assert_array_equal(array(attend(POINTS, **{name: each})), expected)
    np.testing.assert_array_equal(array(attend(keras.Variable(POINTS))), array(attend(keras.ops.array(POINTS))))
    attend.weights[0].regularizer = keras.regularizers.L2(0.5)  # as the error for kernel_regularizer says
    np.testing.assert_allclose(array(attend.losses[0]), np.sum(array(attend.weights[0]) ** 2) / 2, rtol=1e-6)
    pair = attend(keras.Input((5, 8)), return_weights=True)
    for symbol, shape in (
        (pair.output, (None, 5, 8)),
        (pair.weights, (None, 2, 5, 5)),
    ):  # TensorFlow may know fewer sizes
        assert [found in (None, size) for found, size in zip(symbol.shape, shape, strict=True)] == [True] * len(shape)
        assert symbol.shape[-1] == shape[-1]
    try:
        attention_core.scaled_dot_product_attention(*[keras.Input((5, 8))] * 3)
    except TypeError as error:
        assert "got KerasTensor: functions take it inside of a layer of Keras" in str(error)  # noqa: PT017 (a script without pytest)
    else:
        raise AssertionError("a symbol is no array")


def converted(dtype="float32"):
    """Keras's own attention is a layer here and back."""
    inputs = [np.sin(np.arange(size, dtype=dtype)).reshape(2, -1, 7) for size in (70, 42, 42)]
    mask = np.tile(np.tri(5, 3, dtype=bool), (2, 1, 1))
    for kind, settings in (
        (keras.layers.MultiHeadAttention, {"num_heads": 3, "key_dim": 4, "output_shape": 5}),
        (keras.layers.GroupQueryAttention, {"num_query_heads": 6, "num_key_value_heads": 2, "head_dim": 4}),
    ):
        theirs = kind(**settings, dtype=dtype, bias_initializer="random_normal")
        query, key, value = inputs
        expected = array(theirs(query, value, key, attention_mask=mask))
        conversion = importlib.import_module("attention_models.keras.conversion")
        ours = conversion.from_module(theirs)
        found = array(ours(query, key, value, mask=mask[:, None]))
        assert found.dtype == dtype
        np.testing.assert_allclose(found, expected, atol=2e-6)
        assert digest(*conversion.to_module(ours, kind).weights) == digest(*theirs.weights)


def dropped():
    """First weights, what a seed drops, and what a generator of Keras drops, as one hash: equal on all libraries."""
    exact = {"dropout": 0.5, "seed": 7, "arithmetic": "reproducible"}
    layer = ak.EncoderLayer(8, 2, 12, **exact)
    first = [layer(POINTS, training=True), layer(POINTS, training=True), *layer.weights]
    source = keras.random.SeedGenerator(3)
    by_generator = ak.FeedForward(8, 12, **exact)(POINTS, training=True, seed=source)
    function = attention_core.scaled_dot_product_attention(
        *[keras.ops.convert_to_tensor(POINTS)] * 3,
        dropout=attention_core.Dropout(0.5, source),
        arithmetic="reproducible",
    )
    assert not np.array_equal(array(first[0]), array(first[1]))
    return digest(*first, by_generator, function)


def recorded():
    """Layers of a functional model are recorded in order, with the same bits; a compiled call is not."""
    model = functional()
    expected = array(model(TOKENS))
    with attention_core.weights.record_attention() as records:
        found = array(model(TOKENS))
    assert found.tobytes() == expected.tobytes()
    assert [tuple(each.query.shape) for each in records] == [(2, 2, 4, 4), (2, 2, 4, 4)]
    tokens, every = TOKENS[:, None] != 0, np.ones((2, 1, 4), bool)  # padding of the embedding reaches the layers
    attends = ((every, tokens), (tokens, tokens))  # queries, and keys
    for each, (queries, keys) in zip(records, attends, strict=True):
        weights = array(each.weights())
        assert weights.dtype == "float32"
        np.testing.assert_allclose(weights.sum(-1), np.broadcast_to(queries, weights.shape[:-1]), rtol=1e-5)
        assert not weights[np.broadcast_to(~keys[..., None, :], weights.shape)].any()
        assert len(attention_view.view(each).maps) == 2
    theirs = keras.layers.MultiHeadAttention(2, 4)
    _, weights = theirs(POINTS, POINTS, return_attention_scores=True)
    ours = importlib.import_module("attention_models.keras.conversion").from_module(theirs)
    with attention_core.weights.record_attention() as records:
        ours(POINTS, POINTS, POINTS)
    np.testing.assert_allclose(array(records[0].weights()), array(weights), atol=1e-6)
    try:
        with attention_core.weights.record_attention():
            model.predict(TOKENS, verbose=0)
    except ValueError as error:
        assert "expected eager calls while attention is recorded" in str(error)  # noqa: PT017 (a script without pytest)
    else:
        assert LIBRARY == "torch"  # whose predictions are eager


def main():
    assert not LOADED, LOADED
    assert ADAPTERS == [LIBRARY], ADAPTERS
    found = {"others": [digest(keras.models.load_model(other)(TOKENS)) for other in OTHERS]}
    keras.utils.set_random_seed(1)
    model = functional("reproducible")
    model.layers[1].set_weights([np.arange(72, dtype="float32").reshape(9, 8) / 72])
    model.save(SAVED)
    found["saved"] = digest(model(TOKENS))
    if WHAT == "layers":
        assert digest(keras.models.load_model(SAVED)(TOKENS)) == found["saved"]
        check_layers()
        found["dropped"] = dropped()
    print(json.dumps(found))


def check_layers():
    masked()
    trained()
    configured()
    converted()
    recorded()
    if LIBRARY == "jax":
        with importlib.import_module("jax").enable_x64(True):
            converted("float64")
        preset()


def preset():
    """Call the layer as the kit does, in two programs: its weights are numbers, whichever program asks first."""
    import jax

    sys.path.append(str(Path(__file__).parents[2] / "evidence"))
    from attention_conformance import load_target

    attention = jax.jit(load_target("survey.presets:keras_mha_preset").function)
    for rows in (2, 3):
        x = np.ones((1, rows, 1, 4), "float32")
        assert np.abs(array(attention(x, x, x)) - 1).max() < 1e-6


if __name__ == "__main__":
    main()
