"""Layers as modules of Flax: variables, modes, streams of keys, and what they compute."""

import copy
import doctest
import importlib
import os

import numpy as np
import pytest
from layer_helpers import CASES as LAYERS, class_of, definition_of

from attention_core import layers

ASKED = [name for name in os.environ.get("ATTENTION_CORE_BACKENDS", "").split(",") if name]
if ASKED and "jax" not in ASKED:
    pytest.skip("jax is not among the backends asked for", allow_module_level=True)
jax = importlib.import_module("jax") if ASKED else pytest.importorskip("jax")
nnx = (
    importlib.import_module("flax.nnx")
    if os.environ.get("ATTENTION_CORE_PEERS") == "1"
    else pytest.importorskip("flax.nnx")
)

jnp = jax.numpy
attention_jax = importlib.import_module("attention_jax")
modules = importlib.import_module("attention_jax.nnx")

X = jnp.asarray(np.random.default_rng(31).standard_normal((2, 5, 6)))
KINDS = ("FeedForward", "SaganAttention")  # with dropout, and with a state: all modules are one class of ours
kinds = pytest.mark.parametrize("name", KINDS)


def made(name, **options):
    settings, inputs, _ = LAYERS[name]
    module = getattr(modules, name)(**settings, rngs=nnx.Rngs(0), **{"param_dtype": "float64"} | options)
    if name == "SaganAttention":
        module.parameters.sigma[...] = jnp.full_like(module.parameters.sigma[...], 0.7)
    return module, tuple(map(jnp.asarray, inputs))


def loss(module, *inputs, **options):
    output = module(*inputs, **options)
    return jnp.sum(output * jnp.cos(jnp.arange(output.size, dtype=output.dtype)).reshape(output.shape))


def equal(actual, desired):
    """Bit for bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    for found, expected in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def close(actual, desired):
    for found, expected in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_a_module_is_the_layer_of_its_name(name):
    kind = class_of(name, "attention_jax.nnx")
    module = nnx.eval_shape(lambda: kind(**LAYERS[name][0], rngs=nnx.Rngs(0)))
    assert module.kind is class_of(name, "attention_jax")
    assert module.definition == definition_of(name)(**LAYERS[name][0])


@kinds
def test_a_module_computes_what_its_layer_does_split_merged_and_copied(name):
    module, inputs = made(name, deterministic=True)
    expected = module.layer(*inputs)
    equal(module(*inputs), expected)
    close(nnx.jit(lambda module, inputs: module(*inputs))(module, inputs), expected)
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)
    hash(graph)
    equal(nnx.merge(graph, parameters, rest)(*inputs), expected)
    equal(jax.jit(lambda parameters: nnx.merge(graph, parameters, rest).layer)(parameters), module.layer)
    equal(copy.deepcopy(module)(*inputs), expected)
    abstract = nnx.eval_shape(lambda: made(name, deterministic=True)[0])
    nnx.update(abstract, nnx.state(module))
    equal(abstract(*inputs), expected)
    again = modules.Layer(module.layer, deterministic=True)
    equal(again.layer, module.layer)
    equal(again(*inputs), expected)


def test_settings_are_changed_in_a_copy_and_not_by_assignment():
    module = modules.FeedForward(5, 7, rngs=nnx.Rngs(0))
    x = np.linspace(-1, 1, 10, dtype=np.float32).reshape(2, 5)
    with pytest.raises(AttributeError):
        module.arithmetic = "reproducible"
    exact = module.definition.with_settings(arithmetic="reproducible")
    expected = exact(module.layer.to_numpy()[0], x)
    changed = module.with_settings(arithmetic="reproducible")
    np.testing.assert_array_equal(changed(x), expected)
    assert module.definition.arithmetic == "fast"
    module.definition = exact
    np.testing.assert_array_equal(module(x), expected)


def test_variables_are_found_by_kind_and_path():
    module, _ = made("SaganAttention")
    paths = {".".join(path) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    names = [f"{name}.{part}" for name in ("theta", "phi", "g", "output") for part in ("weight", "bias")]
    assert paths == {f"parameters.{name}" for name in (*names, "sigma")}
    for kind in (modules.SpectralVector, nnx.BatchStat):
        paths = {".".join(path) for path, _ in nnx.to_flat_state(nnx.state(module, kind))}
        assert paths == {f"state.{name}" for name in ("theta", "phi", "g", "output")}


@kinds
def test_gradients_are_those_of_the_layer(name):
    module, inputs = made(name)
    module.eval()
    found = nnx.jit(nnx.grad(loss))(module, *inputs)
    of_layer = jax.jit(jax.grad(lambda layer: loss(layer, *inputs)))(module.layer)
    expected = nnx.state(modules.Layer(of_layer), nnx.Param)
    assert [path for path, _ in nnx.to_flat_state(found)] == [path for path, _ in nnx.to_flat_state(expected)]
    close(found, expected)


def test_the_state_is_advanced_in_training_and_stays_in_evaluation():
    module, (x,) = made("SaganAttention")
    for run in (modules.SaganAttention.__call__, nnx.jit(lambda module, x: module(x))):
        before = module.layer
        module.train()
        run(module, x)
        close(module.layer.state, before.refreshed().state)
        assert (module.layer.state.theta != before.state.theta).any()
        module.eval()
        before = module.layer
        run(module, x)
        equal(module.layer, before)
    module(x, deterministic=False)
    assert (module.layer.state.theta != before.state.theta).any()
    before = module.layer
    nnx.jit(nnx.grad(loss))(nnx.view(module, deterministic=False), x)  # which has the same variables
    close(module.layer.state, before.refreshed().state)


def test_dropout_draws_from_its_stream_in_training_alone():
    module, inputs = made("FeedForward")
    quiet = module.layer(*inputs)
    first, second = module(*inputs), module(*inputs)
    assert (first != second).any()
    assert (first != quiet).any()
    equal(module(*inputs, deterministic=True), quiet)
    equal(nnx.view(module, deterministic=True)(*inputs), quiet)
    module.eval()
    equal(module(*inputs), quiet)
    module.train()
    assert (module(*inputs) != quiet).any()
    equal(module(*inputs, rngs=6), module.layer(*inputs, key=6))
    key = jax.random.key(6)
    equal(module(*inputs, rngs=key), module.layer(*inputs, key=key))
    streams = [nnx.Rngs(dropout=5), nnx.Rngs(dropout=5)["dropout"], nnx.Rngs(5)]
    equal(module(*inputs, rngs=streams[0]), module(*inputs, rngs=streams[1]))
    assert (module(*inputs, rngs=streams[0]) != module(*inputs, rngs=streams[1])).sum() == 0  # the second of both
    assert (module(*inputs, rngs=streams[2]) != quiet).any()


def test_modules_of_one_seed_drop_the_same_and_compiled_ones_go_on_drawing():
    (module, inputs), (other, _) = made("FeedForward"), made("FeedForward")
    run = nnx.jit(lambda module, inputs: module(*inputs))
    first, second = run(module, inputs), run(module, inputs)
    close([first, second], [other(*inputs), other(*inputs)])
    assert (first != second).any()


def test_dropout_without_a_stream_is_an_error_in_training():
    layer = attention_jax.FeedForward.init(0, 6, 7, dropout=0.5, dtype="float64")
    module = modules.Layer(layer)
    with pytest.raises(ValueError):
        module(X)
    equal(module(X, rngs=1), layer(X, key=1))
    plain = attention_jax.FeedForward(layers.FeedForward(6, 7), layer.parameters)
    equal(modules.Layer(plain)(X), layer(X))


def test_types_are_promoted_as_in_layers_of_flax():
    module, inputs = made("FeedForward", param_dtype="float32", deterministic=True)
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), inputs)
    assert module(*narrow).dtype == nnx.Linear(6, 7, rngs=nnx.Rngs(0))(X.astype("bfloat16")).dtype == "float32"
    equal(module(*narrow), module.layer(*[x.astype("float32") for x in narrow]))
    gradients = nnx.jit(nnx.grad(lambda module: loss(module, *inputs).astype("float32")))(module)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"float32"}
    module.dtype = jnp.bfloat16
    equal(module(*inputs), module.layer.astype("bfloat16")(*narrow))


def test_a_module_with_bfloat16_throughout_keeps_its_state_in_it():
    module, (x,) = made("SaganAttention", param_dtype=jnp.bfloat16)
    assert module(x.astype("bfloat16")).dtype == "bfloat16"
    assert {leaf.dtype.name for leaf in jax.tree.leaves(module.layer)} == {"bfloat16"}


def test_a_module_is_stacked_by_vmap_and_scanned():
    @nnx.vmap
    def stacked(rngs):
        return modules.EncoderLayer(6, 2, 7, param_dtype="float64", deterministic=True, rngs=rngs)

    stack = stacked(nnx.Rngs(0).split(3))
    expected = X
    graph, state = nnx.split(stack)
    for index in range(3):
        expected = nnx.merge(graph, jax.tree.map(lambda leaf, index=index: leaf[index], state))(expected)
    close(nnx.scan(lambda x, module: module(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(X, stack), expected)


@pytest.mark.parametrize("wrong", [0, "no", float("nan")])
def test_deterministic_is_true_or_false(wrong):
    module, inputs = made("FeedForward")
    uses = (
        lambda: made("FeedForward", deterministic=wrong),
        lambda: module(*inputs, deterministic=wrong),
        lambda: module.set_view(deterministic=wrong),
    )
    for use in uses:
        with pytest.raises(TypeError):
            use()


@pytest.mark.parametrize("home", ["attention_jax.nnx", "attention_models.jax.nnx"])
def test_examples_of_the_documentation_run(home):
    with jax.enable_x64(False):
        found = doctest.testmod(importlib.import_module(home))
    assert found.attempted > 0
    assert found.failed == 0
