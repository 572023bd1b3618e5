"""Layers of JAX are pytrees: every transformation takes them, and they compute what their definitions say."""

import dataclasses
import functools
import importlib

import numpy as np
import pytest
from jax_layer_helpers import CASES, X, attention_jax, close, equal, few, jax, jnp, made

import attention_core as ac

export = importlib.import_module("jax.export")


def loss(layer, inputs, options):
    output = layer(*inputs, **options)
    return jnp.sum(output * jnp.cos(jnp.arange(output.size, dtype=output.dtype)).reshape(output.shape))


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
    with pytest.raises(AttributeError):
        layer.parameters = ()
    assert repr(layer) == f"attention_jax.{layer.definition!r}"


@few
def test_a_layer_goes_through_jit_as_an_argument_and_closed_over(name):
    layer, inputs, options = made(name)
    _, raw, same = CASES[name]
    expected = layer(*raw, **same)  # of NumPy
    apply = jax.jit(lambda layer, inputs, options: layer(*inputs, **options))
    close(apply(layer, inputs, options), expected)
    close(jax.jit(layer)(*inputs, **options), expected)
    apply(jax.tree.map(lambda leaf: 1.1 * leaf, layer), inputs, options)
    assert apply._cache_size() == 1  # the settings are the same, although another object says them


def descend(layer, inputs, options):
    value, gradients = jax.value_and_grad(loss)(layer, inputs, options)
    return jax.tree.map(lambda p, g: p - 0.01 * g, layer.refreshed(), gradients), value


@few
def test_one_rule_updates_all_leaves_and_leaves_the_state_alone(name):
    layer, inputs, options = made(name)
    gradients = jax.jit(jax.grad(loss))(layer, inputs, options)
    assert jax.tree.structure(gradients) == jax.tree.structure(layer)
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradients.state))
    (new, value), again = jax.jit(descend)(layer, inputs, options), jax.jit(loss)
    close(new.state, layer.refreshed().state)
    if layer.parameters:
        assert again(dataclasses.replace(new, state=layer.state), inputs, options) < value


@few
def test_a_stack_of_layers_goes_through_vmap(name):
    layer, inputs, options = made(name)
    keys = jax.random.split(jax.random.key(7), 3)
    init = jax.jit(functools.partial(type(layer).init, **CASES[name][0], dtype="float64"))
    stack, apart = jax.jit(jax.vmap(init))(keys), [init(key) for key in keys]
    equal(stack, jax.tree.map(lambda *each: jnp.stack(each), *apart))
    call = jax.jit(lambda layer: layer(*inputs, **options))
    close(list(jax.jit(jax.vmap(call))(stack)), list(map(call, apart)))


@pytest.mark.parametrize("key", [None, 4])
def test_stacked_encoder_layers_are_scanned(key):
    init = functools.partial(attention_jax.EncoderLayer.init, dropout=0.2, dtype="float64")
    stack = jax.jit(jax.vmap(lambda key: init(key, 6, 2, 8)))(jax.random.split(jax.random.key(0), 4))

    def scanned(stack, x):
        return jax.lax.scan(lambda x, layer: (jax.checkpoint(layer)(x, key=key), None), x, stack)[0]

    x = expected = jnp.asarray(X)
    call = jax.jit(lambda stack, index, x: jax.tree.map(lambda leaf: leaf[index], stack)(x, key=key))
    for index in range(4):
        expected = call(stack, index, expected)
    close(jax.jit(scanned)(stack, x), expected)
    gradients = jax.jit(jax.grad(lambda stack: jnp.sum(scanned(stack, x) ** 2)))(stack)
    assert all(
        leaf.any(axis=tuple(range(1, leaf.ndim))).all() for leaf in jax.tree.leaves(gradients.parameters.feed_forward)
    )


@few
def test_shapes_are_told_without_values(name):
    layer, *_ = made(name)
    init = functools.partial(getattr(attention_jax, name).init, **CASES[name][0], dtype="float64")
    for shapes in (jax.eval_shape(lambda: init(0)), jax.eval_shape(init, jax.random.key(0))):
        assert jax.tree.structure(shapes) == jax.tree.structure(layer)
        assert jax.tree.map(jnp.shape, jax.tree.leaves(shapes)) == jax.tree.map(jnp.shape, jax.tree.leaves(layer))


@pytest.mark.parametrize(("name", "dims"), [("EncoderLayer", ("b", "l")), ("SaganAttention", ("b",))])
def test_a_layer_is_exported_with_open_sizes(name, dims):
    layer, inputs, options = made(name)
    scope, call = export.SymbolicScope(), jax.jit(lambda layer, inputs, options: layer(*inputs, **options))

    def opened(x):
        text = ", ".join([*dims, *map(str, x.shape[len(dims) :])])
        return jax.ShapeDtypeStruct(export.symbolic_shape(text, scope=scope), x.dtype)

    program = export.deserialize(export.export(call)(layer, *jax.tree.map(opened, (inputs, options))).serialize())
    for at in [(slice(start, None),) * len(dims) for start in (0, 1)]:
        arrays = jax.tree.map(lambda x, at=at: x[at], (inputs, options))
        close(program.call(layer, *arrays), call(layer, *arrays))


def test_caches_are_arguments_of_saved_programs():
    rows = jnp.asarray(np.random.default_rng(3).standard_normal((2, 3, 5, 4)))

    def step(cache, lengths):
        cache, mask = ac.cache.append(cache, rows, rows), ac.KeyLengths(lengths) | ac.Causal(offset=1)
        return cache, ac.scaled_dot_product_attention(rows, *cache[:2], mask=mask, implementation="dense")

    inputs = ac.cache.empty_cache((2,), 3, 5, 4, dtype=jnp.float64, xp=jnp), jnp.asarray([4, 2])
    program = export.deserialize(export.export(jax.jit(step))(*inputs).serialize())
    close(program.call(*inputs), step(*inputs))


def test_gradients_flow_through_a_change_of_type_to_wide_parameters():
    dtype = jnp.bfloat16
    layer, inputs, options = made("EncoderLayer", "float32")
    narrow = jax.tree.map(lambda x: x.astype(dtype), inputs)
    step = jax.jit(jax.grad(lambda layer: loss(layer.astype(dtype), narrow, options).astype("float32")))
    found, expected = step(layer), jax.jit(jax.grad(loss))(layer, inputs, options)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"float32"}
    for leaf, goal in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, goal, rtol=0, atol=0.1 * float(jnp.abs(goal).max()) + 0.02)
