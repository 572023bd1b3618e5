"""Attention over eight devices: under `jax.shard_map`, and in meshes whose axes are automatic or explicit."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attention_core import KeyLengths, scaled_dot_product_attention
from attention_core.functions import layer_norm, linear, rms_norm
from attention_core.parameters import LayerNorm, Linear

SCRIPT = """
import functools, warnings
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from attention_core import Dropout, SlidingWindow, scaled_dot_product_attention
from attention_core.cache import KeyValueCache, append

warnings.simplefilter("error")
assert len(jax.devices()) == 8
spec = PartitionSpec("batch", "heads")
random = np.random.default_rng(5)
arrays = [jnp.asarray(random.standard_normal((8, heads, 40, 6)), jnp.float32) for heads in (4, 2, 2)]
cotangent = jnp.asarray(random.standard_normal((8, 4, 40, 6)), jnp.float32)
calls = {
    "dense": {"implementation": "dense", "is_causal": True},
    "blocks": {"implementation": "blockwise"},
    "window": {"implementation": "blockwise", "mask": SlidingWindow(left=8, right=0)},
    "reproducible": {"arithmetic": "reproducible", "is_causal": True},
    "dropout": {"implementation": "blockwise", "dropout": Dropout(0.2, seed=1)},
}


def output_and_gradients(function, *arrays):  # in one program, as each takes a second to compile
    def loss(query, key, value, cotangent):
        output = function(query, key, value)
        return jnp.sum(output * cotangent), output

    gradients, output = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return output, *gradients


@functools.cache
def on_one_device(name):
    return output_and_gradients(functools.partial(scaled_dot_product_attention, **calls[name]), *arrays, cotangent)


def check_calls(mesh, kind, way):
    for name, options in calls.items():
        if kind is AxisType.Explicit and name not in ("dense", "blocks", "reproducible" if way == "jit" else None):
            continue
        attention = functools.partial(scaled_dot_product_attention, **options)
        if way == "shard_map":
            if name == "dropout":  # positions are those in a shard
                continue
            attention = jax.shard_map(attention, mesh=mesh, in_specs=spec, out_specs=spec)
        with jax.set_mesh(mesh):
            sharded = [jax.device_put(array, NamedSharding(mesh, spec)) for array in (*arrays, cotangent)]
            output, *gradients = output_and_gradients(attention, *sharded)
            if way == "shard_map" or kind is AxisType.Explicit:  # else XLA chooses
                assert output.sharding.is_equivalent_to(sharded[0].sharding, 4), (name, output.sharding)
            if kind is AxisType.Explicit and way == "jit":
                attention(*sharded[:3])  # eagerly
        for found, wanted in zip((output, *gradients), on_one_device(name), strict=True):
            if name == "reproducible":
                np.testing.assert_array_equal(found, wanted, err_msg=name)
            else:
                np.testing.assert_allclose(found, wanted, atol=2e-5, err_msg=name)


def check_append(mesh):  # to a cache with one length for all samples, or one for each
    for length, of_length in ((np.int32(3), PartitionSpec()), (np.arange(8, dtype=np.int32), PartitionSpec("batch"))):
        cache = KeyValueCache(*arrays[1:], jnp.asarray(length))
        new = [array[:, :, :1] + 1 for array in arrays[1:]]
        expected = append(cache, *new)
        with jax.set_mesh(mesh):
            specs = KeyValueCache(spec, spec, of_length)
            place = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
            found = jax.jit(append)(jax.tree.map(place, cache, specs), *(place(array, spec) for array in new))
        for array, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(array, wanted)


def check_gradient_of_what_is_the_same_everywhere(mesh):  # it is the sum of those of all devices
    for name in ("blocks", "reproducible"):

        def attention(query, key):
            return scaled_dot_product_attention(query, key, key, **calls[name])

        everywhere = PartitionSpec(None, "heads")
        sharded = jax.shard_map(attention, mesh=mesh, in_specs=(spec, everywhere), out_specs=spec)
        shared = [arrays[0][:, :2], arrays[1][:1]]

        def loss(function, query, key):
            return jnp.sum(function(query, key) * jnp.cos(query))

        def spread(query, key):
            return attention(query, jnp.broadcast_to(key, (8, *key.shape[1:])))

        def local(query, key):
            return sharded(query, jnp.broadcast_to(key, (2, *key.shape[1:])))

        found, wanted = (jax.jit(jax.grad(functools.partial(loss, f), argnums=1))(*shared) for f in (local, spread))
        np.testing.assert_allclose(found, wanted, atol=2e-5, err_msg=name)


for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((4, 2), ("batch", "heads"), axis_types=(kind, kind))
    check_calls(mesh, kind, "jit")
    check_calls(mesh, kind, "shard_map")
    check_append(mesh)
    if kind is AxisType.Auto:
        check_gradient_of_what_is_the_same_everywhere(mesh)
"""


def test_attention_over_eight_devices_is_that_on_one():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"mask": KeyLengths(np.asarray([3, 5]))}], ids=["causal", "lengths"]
)
def test_eager_gradients_in_a_mesh_of_explicit_axes_are_those_outside(options):
    def gradient(x):
        def loss(x):
            return jnp.sum(scaled_dot_product_attention(x, x, x, implementation="dense", **options) ** 2)

        return jax.grad(loss)(x)

    x = jnp.asarray(np.random.default_rng(5).standard_normal((2, 2, 8, 4)), jnp.float32)
    expected = gradient(x)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        found = gradient(jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch"))))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_gradients_of_what_is_the_same_everywhere_under_shard_map(rng):
    def attend(x, key):
        return scaled_dot_product_attention(x, key, key, implementation="blockwise")

    x, key = (jnp.asarray(rng.standard_normal((1, 2, 5, 4)), "float32") for _ in range(2))
    specs = PartitionSpec("batch"), PartitionSpec()
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(AxisType.Auto,))
    local = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=specs[0])
    found, expected = (jax.vjp(each, x, key)[1](x) for each in (local, attend))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["linear", "layer_norm", "rms_norm", "grouped heads"])
def test_eager_gradients_of_arrays_that_were_made_before_an_explicit_mesh(name, rng):
    """Such an array is in no mesh, and its gradient is not to be in another one than its results."""
    x, weight, scale, key = (
        jnp.asarray(rng.standard_normal(shape), "float32") for shape in ((1, 4, 3, 8), (8, 8), (8,), (1, 2, 5, 8))
    )
    call = {
        "linear": lambda x, **options: linear(Linear(weight, scale), x, **options),
        "layer_norm": lambda x, **options: layer_norm(LayerNorm(scale, scale), x, **options),
        "rms_norm": lambda x, **options: rms_norm(scale, x, **options),
        "grouped heads": lambda x, **options: scaled_dot_product_attention(x, key, key, **options),
    }[name]
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(call(x, arithmetic="reproducible"))))
    expected = gradient(x)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        behind_the_first = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, None, "batch")))
        for array in (x, np.asarray(x), behind_the_first):
            np.testing.assert_array_equal(gradient(array), expected)
