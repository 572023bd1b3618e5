"""Layers of JAX are pytrees: every transformation takes them, and they compute what their definitions say."""

import copy
import dataclasses
import doctest
import functools
import importlib
import inspect
import pickle

import numpy as np
import pytest

from attention_core import Causal, KeyLengths, Mask, MaskFunction, Segments, SlidingWindow, get_backend, layers
from attention_core.masks import And, Appended, Given, Not, Or
from attention_core.parameters import Linear

jax = importlib.import_module("jax")

jnp = jax.numpy
export = importlib.import_module("jax.export")
ravel_pytree = importlib.import_module("jax.flatten_util").ravel_pytree
attention_jax = importlib.import_module("attention_jax")

NUMPY = get_backend("numpy")
RNG = np.random.default_rng(29)
IDS = RNG.integers(0, 11, (2, 5))
X = RNG.standard_normal((2, 5, 6))
MAPS = RNG.standard_normal((2, 4, 6, 8))

# Of every layer: settings, inputs, and options.
CASES = {
    "DotProductAttention": ({"softcap": 2.0, "dropout": 0.4}, (X, X[:, :3], X[:, 1:4] + 1), {"key_mask": np.asarray([[True, True, False], [True] * 3])}),
    "MultiHeadAttention": ({"channels": 6, "num_heads": 2, "num_key_value_heads": 1, "zero_attention": True, "is_causal": True, "dropout": 0.4}, (X,), {"mask": KeyLengths(np.asarray([5, 2]))}),
    "FeedForward": ({"channels": 6, "inner": 7, "output_channels": 3, "dropout": 0.4}, (X,), {}),
    "EncoderLayer": ({"channels": 6, "num_heads": 3, "inner": 7, "dropout": 0.4}, (X,), {"key_mask": np.arange(5) < np.asarray([[5], [3]])}),
    "Embeddings": ({"num_tokens": 11, "num_positions": 7, "channels": 6, "num_segments": 2, "dropout": 0.4}, (IDS,), {"segment_ids": IDS % 2}),
    "SaganAttention": ({"channels": 8, "head_channels": 3, "bias": True}, (MAPS,), {}),
}  # fmt: skip
every = pytest.mark.parametrize("name", CASES)


def shaken(layer, seed=1):
    """A layer whose biases are not zero, and whose scales are not one."""
    flat, back = ravel_pytree(layer.parameters)
    noise = np.random.default_rng(seed).standard_normal(flat.shape)
    return type(layer)(layer.definition, back(flat + 0.3 * jnp.asarray(noise, flat.dtype)), layer.state)


@functools.cache
def made(name, dtype="float64"):
    settings, inputs, options = CASES[name]
    layer = shaken(getattr(attention_jax, name).init(3, **settings, dtype="float64")).astype(dtype)
    return layer, jax.tree.map(lambda x: as_input(x, dtype), inputs), jax.tree.map(jnp.asarray, options)


def as_input(x, dtype):
    return jnp.asarray(x, dtype if jnp.issubdtype(x.dtype, jnp.floating) else None)


def loss(layer, inputs, options):
    output = layer(*inputs, **options)
    return jnp.sum(output * jnp.cos(jnp.arange(output.size, dtype=output.dtype)).reshape(output.shape))


def numbers(tree):
    return jax.tree.leaves(jax.tree.map(lambda x: np.asarray(x, np.float64), tree))


def close(actual, desired, tolerance=1e-12):
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    for found, expected in zip(numbers(actual), numbers(desired), strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * max(1, np.abs(expected).max()))


def equal(actual, desired):
    """Bit for bit, of the same types."""
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    for found, expected in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        assert found.dtype == expected.dtype
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


@every
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_layer_starts_from_the_values_of_its_definition(name, dtype):
    """Which are the same on every framework."""
    kind = getattr(attention_jax, name)
    layer = kind.init(5, **CASES[name][0], dtype=dtype)
    definition = layer.definition
    assert definition == getattr(layers, name)(**CASES[name][0])
    wide = "float32" if dtype == "bfloat16" else dtype  # which the namespace of NumPy does not have
    expected = [each(5, xp=NUMPY.namespace, dtype=wide) for each in (definition.init, definition.init_state)]
    equal(layer.to_numpy(), tuple(NUMPY.from_numpy(expected, dtype=dtype)))


def test_settings_are_given_by_position_or_by_name_and_shown():
    init = attention_jax.FeedForward.init
    assert init(0, 4, 16, 3, False).definition == layers.FeedForward(4, 16, output_channels=3, bias=False)
    assert list(inspect.signature(init).parameters) == [
        *("key", "channels", "inner", "output_channels", "bias", "dropout", "arithmetic", "dtype", "device")
    ]
    with pytest.raises(ValueError, match="expected channels that 3 heads share out evenly; got 8 channels"):
        attention_jax.MultiHeadAttention.init(0, 8, 3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'chanels'"):
        attention_jax.MultiHeadAttention.init(0, chanels=8, num_heads=2)
    with pytest.raises(ValueError, match=r"expected a floating-point type out of float16, .*; got int8"):
        init(0, 4, 16, dtype=jnp.int8)
    with pytest.raises(ValueError, match=r"expected a device out of .*cpu:0.*; got 'tpu:9'"):
        init(0, 4, 16, device="tpu:9")
    with pytest.raises(ValueError, match=r"expected a seed in \[0, 2\*\*64\); got -1"):
        init(-1, 4, 16)


def test_leaves_are_named():
    layer = attention_jax.SaganAttention.init(0, 8, bias=True, output=False)
    paths = [
        jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree_util.tree_leaves_with_path(layer)
    ]
    assert paths == [
        *(f"parameters.{name}.{field}" for name in ("theta", "phi", "g") for field in ("weight", "bias")),
        *("parameters.sigma", "state.theta", "state.phi", "state.g"),
    ]


def test_arrays_are_placed_where_they_are_asked_for():
    device = jax.devices("cpu")[0]
    for target in (device, "cpu:0", jax.sharding.SingleDeviceSharding(device)):
        layer = attention_jax.FeedForward.init(0, 2, 3, device=target)
        again = attention_jax.FeedForward.from_numpy(layer.definition, *layer.to_numpy(), device=target)
        for leaf in jax.tree.leaves((layer, again)):
            assert leaf.committed
            assert leaf.devices() == {device}


def test_a_layer_does_not_change():
    layer = attention_jax.FeedForward.init(0, 2, 3)
    with pytest.raises(AttributeError, match="cannot assign to field 'parameters'"):
        layer.parameters = ()
    assert repr(layer) == f"attention_jax.{layer.definition!r}"


@every
def test_a_call_is_that_of_the_definition_on_numpy(name):
    layer, inputs, options = made(name)
    parameters, state = layer.to_numpy()
    _, raw, same = CASES[name]
    state_option = {"state": state} if state else {}
    close(layer(*inputs, **options), layer.definition(parameters, *raw, **same, **state_option))


@every
def test_arrays_of_numpy_are_taken(name):
    layer, inputs, options = made(name)
    _, raw, same = CASES[name]
    equal(layer(*raw, **same), layer(*inputs, **options))


def test_inputs_may_be_a_mapping():
    layer, (query, key, value), _ = made("DotProductAttention")
    equal(layer({"query": query, "key": key, "value": value}), layer(query, key, value))


def test_wrong_inputs_are_named():
    layer = attention_jax.MultiHeadAttention.init(0, 6, 2)
    with pytest.raises(TypeError, match="expected inputs as arrays of JAX or NumPy; got str"):
        layer("x")
    with pytest.raises(
        TypeError, match=r"expected query projection.weight of dtype bfloat16 to match query; got float32"
    ):
        layer(jnp.ones((5, 6), "bfloat16"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'masks'"):
        layer(jnp.ones((5, 6), "float32"), masks=None)


@every
def test_a_layer_goes_through_jit_as_an_argument_and_closed_over(name):
    layer, inputs, options = made(name)
    expected = layer(*inputs, **options)
    apply = jax.jit(lambda layer, inputs, options: layer(*inputs, **options))
    close(apply(layer, inputs, options), expected)
    close(jax.jit(lambda inputs, options: layer(*inputs, **options))(inputs, options), expected)
    close(jax.jit(layer)(*inputs, **options), expected)
    apply(shaken(layer, 2), inputs, options)
    assert apply._cache_size() == 1  # the settings are the same, although another object says them


@every
def test_gradients_are_those_of_finite_differences(name):
    layer, inputs, options = made(name)
    floating = [x for x in inputs if x.dtype == jnp.float64]
    flat, back = ravel_pytree((layer.parameters, floating))

    def value(flat):
        parameters, found = back(flat)
        return loss(type(layer)(layer.definition, parameters, layer.state), found or inputs, options)

    step = 1e-5
    steps = step * jnp.eye(flat.size)
    differences = jax.jit(jax.vmap(lambda change: (value(flat + change) - value(flat - change)) / (2 * step)))(steps)
    gradients = jax.jit(jax.grad(loss))(layer, inputs, options).parameters
    d_inputs = jax.jit(jax.grad(lambda found: loss(layer, found or inputs, options)))(floating)
    found, _ = ravel_pytree((gradients, d_inputs))
    assert np.abs(differences).max() > 0.1
    np.testing.assert_allclose(found, differences, rtol=1e-7, atol=1e-8 * float(np.abs(differences).max()))


def descend(layer, inputs, options):
    value, gradients = jax.value_and_grad(loss)(layer, inputs, options)
    return jax.tree.map(lambda p, g: p - 0.01 * g, layer.refreshed(), gradients), value


@every
def test_one_rule_updates_all_leaves_and_leaves_the_state_alone(name):
    layer, inputs, options = made(name)
    gradients = jax.jit(jax.grad(loss))(layer, inputs, options)
    assert jax.tree.structure(gradients) == jax.tree.structure(layer)
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradients.state))
    (new, value), again = jax.jit(descend)(layer, inputs, options), jax.jit(loss)
    close(new.state, layer.refreshed().state)
    if layer.parameters:
        assert again(dataclasses.replace(new, state=layer.state), inputs, options) < value


@every
def test_a_step_of_training_is_compiled_with_donated_layers(name):
    layer, inputs, options = made(name)
    expected, donated = layer, jax.tree.map(jnp.copy, layer)
    same, step = jax.jit(descend), jax.jit(descend, donate_argnums=0)
    for _ in range(3):
        expected, _ = same(expected, inputs, options)
        before = jax.tree.leaves(donated)
        donated, _ = step(donated, inputs, options)
        assert all(leaf.is_deleted() for leaf in before)
    close(donated, expected, 1e-10)


@every
def test_a_layer_goes_through_vmap(name):
    layer, inputs, options = made(name)
    expected = layer(*inputs, **options)
    close(jax.jit(jax.vmap(lambda inputs, options: layer(*inputs, **options)))(inputs, options), expected)
    close(jax.vmap(lambda layer, inputs: layer(*inputs), (None, 0))(layer, inputs), layer(*inputs))


@every
def test_a_stack_of_layers_goes_through_vmap(name):
    kind, settings = getattr(attention_jax, name), CASES[name][0]
    layer, inputs, options = made(name)
    keys = jax.random.split(jax.random.key(7), 3)
    init = functools.partial(kind.init, **settings, dtype="float64")
    stack, apart = jax.jit(jax.vmap(init))(keys), [init(key) for key in keys]
    equal(stack, jax.tree.map(lambda *each: jnp.stack(each), *apart))
    if not layer.parameters:
        return
    outputs = jax.jit(jax.vmap(lambda layer: layer(*inputs, **options)))(stack)
    close(list(outputs), [each(*inputs, **options) for each in apart])


@every
def test_a_layer_goes_through_checkpoint(name):
    layer, inputs, options = made(name)
    found, expected = (jax.jit(jax.grad(function)) for function in (jax.checkpoint(loss), loss))
    close(found(layer, inputs, options), expected(layer, inputs, options))


@pytest.mark.parametrize("key", [None, 4])
def test_stacked_encoder_layers_are_scanned(key):
    stack = jax.vmap(lambda key: attention_jax.EncoderLayer.init(key, 6, 2, 8, dropout=0.2, dtype="float64"))(
        jax.random.split(jax.random.key(0), 4)
    )

    def scanned(stack, x):
        return jax.lax.scan(lambda x, layer: (jax.checkpoint(layer)(x, key=key), None), x, stack)[0]

    x = expected = jnp.asarray(X)
    for index in range(4):
        expected = jax.tree.map(lambda leaf, index=index: leaf[index], stack)(expected, key=key)
    close(jax.jit(scanned)(stack, x), expected)
    gradients = jax.jit(jax.grad(lambda stack: jnp.sum(scanned(stack, x) ** 2)))(stack)
    assert all(
        leaf.any(axis=tuple(range(1, leaf.ndim))).all() for leaf in jax.tree.leaves(gradients.parameters.feed_forward)
    )


@every
def test_shapes_are_told_without_values(name):
    layer, *_ = made(name)
    init = functools.partial(getattr(attention_jax, name).init, **CASES[name][0], dtype="float64")
    for shapes in (jax.eval_shape(lambda: init(0)), jax.eval_shape(init, jax.random.key(0))):
        assert jax.tree.structure(shapes) == jax.tree.structure(layer)
        assert jax.tree.map(jnp.shape, jax.tree.leaves(shapes)) == jax.tree.map(jnp.shape, jax.tree.leaves(layer))


@every
def test_a_layer_is_exported_with_an_open_batch(name):
    layer, inputs, _ = made(name)
    (batch,) = export.symbolic_shape("batch")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), inputs)
    program = export.export(jax.jit(lambda inputs: layer(*inputs)))(shapes)
    program = export.deserialize(program.serialize())
    more = jax.tree.map(lambda x: jnp.concat([x, x[:1]]), inputs)
    for arrays in (inputs, more):
        close(program.call(arrays), layer(*arrays))
    whole = export.export(jax.jit(lambda layer, inputs: layer(*inputs)))(layer, shapes)
    close(whole.call(layer, more), layer(*more))


@every
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_are_computed_in_float32_and_rounded_once(name, dtype):
    wide, inputs, options = made(name, "float32")
    layer, narrow = wide.astype(dtype), jax.tree.map(lambda x: as_input(np.asarray(x), dtype), inputs)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(layer)} <= {dtype}
    found = layer(*narrow, **options)
    expected = layer.astype("float32")(*jax.tree.map(lambda x: as_input(np.asarray(x), "float32"), narrow), **options)
    assert found.dtype == dtype
    if name == "SaganAttention":  # whose normalized kernels are rounded in between
        close(found, expected, 2.0 ** (-6 if dtype == "bfloat16" else -9))
    else:
        equal(found, expected.astype(dtype))


@pytest.mark.parametrize("dtype", ["float16", jnp.bfloat16])
def test_gradients_flow_through_a_change_of_type_to_wide_parameters(dtype):
    layer, inputs, options = made("EncoderLayer", "float32")
    narrow = jax.tree.map(lambda x: x.astype(dtype), inputs)
    step = jax.jit(jax.grad(lambda layer: loss(layer.astype(dtype), narrow, options).astype("float32")))
    found, expected = step(layer), jax.grad(loss)(layer, inputs, options)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"float32"}
    for leaf, goal in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, goal, rtol=0, atol=0.1 * float(jnp.abs(goal).max()) + 0.02)


def test_types_that_jax_does_not_compute_with_are_named():
    layer = attention_jax.FeedForward.init(0, 2, 3)
    for dtype, got in (("int32", "int32"), (None, "None"), ("real", "real"), (np.complex64, "complex64")):
        with pytest.raises(ValueError, match=f"expected a floating-point type out of float16, .*; got {got}"):
            layer.astype(dtype)
    with jax.enable_x64(False), pytest.raises(ValueError, match="got float64: turn on jax_enable_x64"):
        attention_jax.FeedForward.init(0, 2, 3, dtype="float64")


DROPPING = [name for name, (settings, *_) in CASES.items() if "dropout" in settings]


@pytest.mark.parametrize("name", DROPPING)
def test_a_seed_drops_the_same_as_on_numpy(name):
    layer, inputs, options = made(name)
    parameters, _ = layer.to_numpy()
    _, raw, same = CASES[name]
    found = layer(*inputs, **options, key=6)
    close(found, layer.definition(parameters, *raw, **same, seed=6))
    close(jax.jit(layer)(*inputs, **options, key=6), found)
    equal(layer(*inputs, **options, key=jnp.asarray([6, 0], "int32")), found)
    assert (found != layer(*inputs, **options)).any()


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_a_key_of_jax_is_a_seed(implementation):
    layer = attention_jax.FeedForward.init(0, 6, 7, dropout=0.5, dtype="float64")
    with jax.default_prng_impl(implementation):
        typed, raw, other = jax.random.key(3), jax.random.PRNGKey(3), jax.random.key(4)
        found = layer(X, key=typed)
        equal(layer(X, key=raw), found)
        equal(layer(X, key=np.asarray(raw)), found)
        close(jax.jit(lambda key: layer(X, key=key))(typed), found)
        assert ((layer(X, key=other) == 0) != (found == 0)).any()
        words = jax.random.bits(typed, (2,), "uint32").astype("int32")
        equal(layer(X, key=words), found)
        equal(
            attention_jax.FeedForward.init(raw, 6, 7).parameters, attention_jax.FeedForward.init(typed, 6, 7).parameters
        )
    keys = jax.random.split(jax.random.key(1), 2)
    each = jax.vmap(lambda key: layer(X[0], key=key))(keys)
    close(list(each), [layer(X[0], key=key) for key in keys])
    assert ((each[0] == 0) != (each[1] == 0)).any()


def test_a_layer_that_never_drops_takes_no_notice_of_a_key():
    for name in ("SaganAttention", "FeedForward"):
        layer, inputs, _ = made(name)
        if name == "FeedForward":
            layer = attention_jax.FeedForward(layers.FeedForward(6, 7, 3), layer.parameters)
        equal(layer(*inputs, key=jax.random.key(0)), layer(*inputs))


def test_the_state_is_advanced_outside_of_the_call_and_without_a_gradient():
    layer, (x,), _ = made("SaganAttention")
    before = jax.tree.map(jnp.copy, layer.state)
    layer(x)
    equal(layer.state, before)
    new = layer.refreshed()
    parameters, state = layer.to_numpy()
    close(new.state, jax.tree.map(jnp.asarray, layer.definition.refreshed(parameters, state)))
    assert all((new_array != other).any() for new_array, other in zip(new.state, layer.state, strict=True))
    assert new.parameters is layer.parameters
    gradients = jax.grad(lambda layer: sum(jnp.sum(leaf) for leaf in layer.refreshed().state))(layer)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients))
    plain = attention_jax.SaganAttention.init(0, 8, spectral_norm=False)
    assert plain.state == plain.refreshed().state == ()


@every
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_layer_goes_to_numpy_and_back_bit_for_bit(name, dtype):
    layer, *_ = made(name, dtype)
    arrays = layer.to_numpy()
    assert all(isinstance(leaf, np.ndarray) and leaf.dtype.name == dtype for leaf in jax.tree.leaves(arrays))
    for kind in (attention_jax.Layer, type(layer)):
        again = kind.from_numpy(layer.definition, *arrays)
        assert type(again) is type(layer)
        equal(again, layer)
    equal(type(layer).from_numpy(layer.definition, *arrays, dtype="bfloat16"), layer.astype("bfloat16"))


def test_arrays_that_are_not_those_of_the_definition_are_named():
    kind, definition = attention_jax.FeedForward, layers.FeedForward(2, 3)
    good, _ = kind.init(0, 2, 3).to_numpy()
    for arguments, error, message in (
        ((definition, good._replace(expand=Linear(np.ones((2, 3))))), TypeError, r"expected parameters.expand.bias as an array of shape \(3,\); got NoneType"),
        ((definition, good._replace(expand=Linear(np.ones((3, 2)), np.ones(3)))), ValueError, r"expected parameters.expand.weight \(2, 3\); got \(3, 2\)"),
        ((layers.FeedForward(2, 3, bias=False), good), ValueError, r"expected no parameters.expand.bias; got an array of shape \(3,\)"),
        ((layers.MultiHeadAttention(2, 1), good), TypeError, "expected a definition as FeedForward; got MultiHeadAttention"),
        ((3, good), TypeError, "expected a definition as FeedForward; got int"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            kind.from_numpy(*arguments)
    layer, *_ = made("SaganAttention")
    with pytest.raises(TypeError, match="expected state as SpectralVectors; got tuple"):
        attention_jax.Layer.from_numpy(layer.definition, layer.to_numpy()[0])
    with pytest.raises(TypeError, match="expected a definition as Layer; got int"):
        attention_jax.Layer.from_numpy(3, ())


@pytest.mark.parametrize("wrong", [np.ones((2, 5, 8)), jnp.ones(()), "key", 1.5, -1])
def test_what_is_no_key_is_named(wrong):
    """Above all the keys to attend to, which other frameworks take under that name."""
    layer = attention_jax.MultiHeadAttention.init(0, 8, 2)
    with pytest.raises((TypeError, ValueError), match=r"expected (key as a key of jax.random|a seed)"):
        layer(jnp.ones((2, 5, 8), "float32"), key=wrong)


@pytest.mark.parametrize("name", ["seed", "state"])
def test_names_of_the_core_are_not_overwritten(name):
    layer = attention_jax.FeedForward.init(0, 4, 8, dropout=0.5)
    with pytest.raises(TypeError, match=f"expected the seed as key=, and the state in the layer; got {name}="):
        layer(jnp.ones((3, 4), "float32"), **{name: 3})


def test_a_class_of_your_own_is_a_layer():
    class Mine(attention_jax.FeedForward):
        pass

    layer = Mine.init(0, 6, 7)
    assert type(jax.tree.map(jnp.zeros_like, layer)) is Mine
    assert type(Mine.from_numpy(layer.definition, *layer.to_numpy())) is Mine


@every
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_layer_is_saved_and_loaded_bit_for_bit(name, dtype, tmp_path):
    layer, *_ = made(name, dtype)
    path = tmp_path / "layer.safetensors"
    attention_jax.save(layer, path)
    again = attention_jax.load(path)
    assert type(again) is type(layer)
    assert again.definition == layer.definition
    equal(again, layer)
    equal(attention_jax.load(path, dtype="float16", device="cpu:0"), layer.astype("float16"))
    with pytest.raises(TypeError, match="expected a layer of attention_jax; got tuple"):
        attention_jax.save((), path)


@every
@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"]
)
def test_a_layer_is_copied_and_pickled(name, again):
    layer, inputs, options = made(name)
    other = again(layer)
    assert type(other) is type(layer)
    assert other.definition == layer.definition
    equal(other, layer)
    equal(other(*inputs, **options), layer(*inputs, **options))


LENGTHS = jnp.asarray([5, 2])
SEEN = jnp.asarray(RNG.random((2, 1, 5, 5)) < 0.7)
MASKS = {
    "causal": (Causal(LENGTHS - 3), 1),
    "causal of a number": (Causal(1), 0),
    "lengths": (KeyLengths(LENGTHS), 1),
    "window": (SlidingWindow(2, None, LENGTHS - 4), 1),
    "segments": (Segments(IDS_ := jnp.asarray(IDS % 3), IDS_), 2),
    "function": (MaskFunction(lambda batch, head, query, key, even: even[query % 2, key % 3], (SEEN[0, 0],)), 1),
    "array": (Given(SEEN), 1),
    "appended": (Appended(KeyLengths(LENGTHS), 4), 1),
    "combined": ((Causal() | ~KeyLengths(LENGTHS)) & Given(SEEN) & SlidingWindow(3, 1), 2),
}
masks = pytest.mark.parametrize("name", MASKS)


@masks
def test_masks_are_pytrees_of_their_arrays(name):
    mask, count = MASKS[name]
    leaves, form = jax.tree.flatten(mask)
    assert len(leaves) == count
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert hash(form) == hash(jax.tree.structure(jax.tree.unflatten(form, leaves)))
    for placeholder in (0, 1.0, object(), "x"):  # whatever JAX puts in the place of an array
        holding = jax.tree.unflatten(form, [placeholder] * count)
        assert jax.tree.flatten(holding) == ([placeholder] * count, form)


@masks
def test_masks_go_through_jit_as_arguments(name):
    mask, _ = MASKS[name]
    layer = attention_jax.MultiHeadAttention.init(0, 6, 2, dtype="float64")
    apply = jax.jit(lambda layer, x, mask: layer(x, mask=mask))
    expected = layer(X, mask=mask)
    assert (expected != layer(X)).any()
    close(apply(layer, X, mask), expected)
    close(apply(layer, X, jax.tree.map(jnp.copy, mask)), expected)
    assert apply._cache_size() == 1
    if name == "lengths":
        close(apply(layer, X, KeyLengths(LENGTHS - 1)), layer(X, mask=KeyLengths(LENGTHS - 1)))
        assert apply._cache_size() == 1
    gradients = jax.jit(jax.grad(lambda layer, mask: jnp.sum(layer(X, mask=mask) ** 2)))(layer, mask)
    close(gradients, jax.grad(lambda layer: jnp.sum(layer(X, mask=mask) ** 2))(layer))


@pytest.mark.parametrize("name", ["causal", "lengths", "array", "combined", "segments"])
def test_masks_go_through_vmap_with_their_leading_axes(name):
    mask, _ = MASKS[name]
    layer = attention_jax.MultiHeadAttention.init(0, 6, 2, dtype="float64")
    close(jax.vmap(lambda x, mask: layer(x, mask=mask))(X, mask), layer(X, mask=mask))
    close(
        jax.vmap(lambda x, mask: layer(x, mask=mask), in_axes=(None, 0))(X[0], mask)[1],
        layer(X[:1], mask=jax.tree.map(lambda leaf: leaf[1:], mask))[0],
    )


def test_masks_of_numpy_are_taken():
    layer = attention_jax.MultiHeadAttention.init(0, 6, 2, dtype="float64")
    found = layer(X, mask=Causal(np.asarray([2, -1])) & np.asarray(SEEN))
    equal(found, layer(X, mask=Causal(jnp.asarray([2, -1])) & SEEN))


def test_every_mask_is_registered_and_one_of_your_own_can_be():
    known = {And, Appended, Causal, Given, KeyLengths, MaskFunction, Not, Or, Segments, SlidingWindow}
    kinds = {
        kind
        for kind in _descendants(Mask)
        if kind.__module__ == "attention_core.masks" and not kind.__name__.startswith("_")
    }
    assert kinds == known
    for kind in known:
        with pytest.raises(ValueError, match="Duplicate"):
            attention_jax.register_mask(kind)

    @attention_jax.register_mask
    @dataclasses.dataclass(frozen=True, eq=False)
    class Beyond(Mask):
        least: object

        def allowed(self, at, /, *, xp):
            return at.key >= self.least

    layer = attention_jax.MultiHeadAttention.init(0, 6, 2, dtype="float64")
    found = jax.jit(lambda mask: layer(X, mask=mask))(Beyond(jnp.asarray(2)) & Causal())
    close(found, layer(X, mask=(jnp.arange(5) >= 2) & jnp.tri(5, dtype=bool)))


def _descendants(kind):
    return [each for subclass in kind.__subclasses__() for each in (subclass, *_descendants(subclass))]


@pytest.mark.parametrize("module", ["layers", "masks"])
def test_examples_of_the_documentation_run(module):
    with jax.enable_x64(False):
        found = doctest.testmod(importlib.import_module(f"attention_jax.{module}"))
    assert found.attempted > 0
    assert found.failed == 0
