"""Modules of Keras, flax and equinox as layers here and back: the same bits and outputs."""

import importlib
import itertools

import numpy as np
import pytest
from backend_helpers import imported
from conversion_helpers import agree, same, there_and_back, weights

from attention_models.layouts import LayoutError, from_flax, to_flax

# The libraries announce what they deprecate in one another; none of it is about these numbers.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


torch, of_torch = imported("torch"), imported("attention_models.torch.conversion")
keras, of_keras = imported("keras"), imported("attention_models.keras.conversion")
nnx, equinox, of_jax = imported("flax.nnx"), imported("equinox"), imported("attention_models.jax.conversion")


class Keras:
    """`keras.layers.MultiHeadAttention`, or with ``head_dim`` `keras.layers.GroupQueryAttention`."""

    conversion, dropout = "attention_models.keras.conversion", "dropout"
    options = (
        {"num_heads": 3, "key_dim": 4},
        {"num_heads": 3, "key_dim": 4, "value_dim": 5, "use_bias": False, "output_shape": 6, "dropout": 0.25},
        {"num_heads": 3, "key_dim": 5},
        {"num_query_heads": 6, "num_key_value_heads": 2, "head_dim": 4},
        {"num_query_heads": 6, "num_key_value_heads": 1, "head_dim": 16, "use_bias": False},
        {"num_query_heads": 6, "num_key_value_heads": 3, "head_dim": 5, "dropout": 0.25},
    )
    wrong = (
        {"use_gate": True},
        {"sliding_window": 3},
        {"kernel_regularizer": "l2"},
        {"bias_constraint": "non_neg"},
        {"attention_axes": (1, 2)},
        {"output_shape": (3, 4)},
    )
    dtypes = ("float16", "bfloat16", "float32", "mixed_bfloat16")

    def made(self, dtype="float64", **options):
        layers_of_keras = importlib.import_module("keras").layers
        kind = layers_of_keras.GroupQueryAttention if "head_dim" in options else layers_of_keras.MultiHeadAttention
        sizes = {} if "head_dim" in options or "num_heads" in options else {"num_heads": 2, "key_dim": 4}
        module = kind(**sizes, **options, dtype=dtype, bias_initializer="random_normal")
        axes = [None] * (len(options.get("attention_axes", (1,))) + 1)
        module.build((*axes, 12), (*axes, 14), (*axes, 10))
        return module

    def shapes(self, options):
        return (2, 5, 12), (2, 7, 10), (2, 7, 14)

    def called(self, module, query, key, value, mask):
        return module(query, value, key, attention_mask=mask)

    def exactness(self, options):
        width = options.get("head_dim", options.get("key_dim"))
        return "keras.layers.*, 1/√key_dim exact in float32" if width in (4, 16) else "keras.layers.*"

    arrays = staticmethod(weights)


class Flax:
    """`flax.nnx.MultiHeadAttention`."""

    conversion, dropout = "attention_models.jax.conversion", "dropout_rate"
    options = (
        {"num_heads": 3, "in_features": 12},
        {
            "num_heads": 3,
            "in_features": 12,
            "qkv_features": 15,
            "out_features": 8,
            "in_kv_features": 10,
            "use_bias": False,
        },
        {"num_heads": 6, "in_features": 12, "num_kv_heads": 2, "dropout_rate": 0.25, "broadcast_dropout": False},
        {"num_heads": 6, "in_features": 12, "num_kv_heads": 3, "qkv_features": 24, "in_kv_features": 10},
    )
    wrong = (
        {"normalize_qk": True},
        {"dropout_rate": 0.1},
        {"attention_fn": len},
        {"qkv_dot_general": len},
        {"precision": "highest"},
        {"decode": True},
        {"dtype": "bfloat16"},
    )
    dtypes = ("float16", "bfloat16", "float32")

    def made(self, param_dtype="float64", **options):
        nnx = importlib.import_module("flax.nnx")
        sizes = {"num_heads": 2, "in_features": 8, "decode": False} | options
        bias = nnx.initializers.normal(0.3)
        return nnx.MultiHeadAttention(**sizes, param_dtype=param_dtype, bias_init=bias, rngs=nnx.Rngs(0))

    def shapes(self, options):
        width = options.get("in_kv_features", 12)
        return (2, 5, 12), (2, 7, width), (2, 7, width)

    def called(self, module, query, key, value, mask):
        mask = None if mask is None else np.repeat(mask[:, None], module.num_heads, axis=1)
        agree(
            module(query, key, value, mask=mask, deterministic=True),
            exact := module(query, key, value, mask=mask, deterministic=True, sow_weights=True),
            "flax.nnx.MultiHeadAttention",
        )
        return exact

    def exactness(self, options):
        return "flax.nnx.MultiHeadAttention(sow_weights=True)"

    def arrays(self, module):
        nnx = importlib.import_module("flax.nnx")
        flat = nnx.to_pure_dict(nnx.state(module, nnx.Param))
        return {f"{name}.{part}": np.asarray(flat[name][part]) for name in sorted(flat) for part in sorted(flat[name])}


class Equinox:
    """`equinox.nn.MultiheadAttention`, which has no axis for samples."""

    conversion, dropout = "attention_models.jax.conversion", "dropout_p"
    options = (
        {},
        {"use_query_bias": True, "use_key_bias": True, "use_value_bias": True, "use_output_bias": True},
        {"use_query_bias": True, "key_size": 10, "value_size": 14, "output_size": 8, "qk_size": 5, "vo_size": 6},
        {"use_output_bias": True, "dropout_p": 0.25},
    )
    wrong = ()
    dtypes = ("float16", "bfloat16", "float32")

    def made(self, dtype="float64", **options):
        equinox, jax = importlib.import_module("equinox"), importlib.import_module("jax")
        module = equinox.nn.MultiheadAttention(3, 12, **options, dtype=dtype, key=jax.random.key(1))
        return equinox.nn.inference_mode(module)

    def shapes(self, options):
        return (5, 12), (7, options.get("key_size", 12)), (7, options.get("value_size", 12))

    def called(self, module, query, key, value, mask):
        module = importlib.import_module("equinox").nn.inference_mode(module)
        return module(query, key, value, None if mask is None else mask[0])

    def exactness(self, options):
        return "equinox.nn.MultiheadAttention"

    def arrays(self, module):
        parts = itertools.product(("query_proj", "key_proj", "value_proj", "output_proj"), ("weight", "bias"))
        found = {f"{name}.{part}": getattr(getattr(module, name), part) for name, part in parts}
        return {name: np.asarray(array) for name, array in found.items() if array is not None}


PEERS = {"tensorflow": Keras(), "flax": Flax(), "equinox": Equinox()}


def rows(field):
    """Every peer with each of a field, as far as the library is there."""
    marks = {name: pytest.mark.needs(name, *(() if name == "tensorflow" else ("jax",))) for name in PEERS}
    return [
        pytest.param(peer, each, marks=marks[name], id=f"{name}-{each}")
        for name, peer in PEERS.items()
        for each in getattr(peer, field)
    ]


@pytest.mark.parametrize(("peer", "options"), rows("options"))
def test_attention_of_other_libraries_is_a_layer_and_a_module_again(peer, options, rng):
    theirs = peer.made(**options)
    ours, back = there_and_back(importlib.import_module(peer.conversion), theirs, peer.arrays)
    assert ours.definition.dropout == options.get(peer.dropout, 0.0)
    inputs = [rng.standard_normal(shape) for shape in peer.shapes(options)]
    mask = rng.random((2, 5, 7)) < 0.6
    mask[..., 0] = True
    for each in (None, mask, mask & np.tri(5, 7, dtype=bool)):
        our_mask = each if each is None or len(inputs[0].shape) == 2 else each[:, None]
        our_mask = our_mask[0] if each is not None and len(inputs[0].shape) == 2 else our_mask
        found = np.asarray(ours(*inputs, **({} if our_mask is None else {"mask": our_mask})))
        for module in (theirs, back):
            agree(found, peer.called(module, *inputs, each), peer.exactness(options))


@pytest.mark.parametrize(("peer", "dtype"), rows("dtypes"))
def test_weights_of_any_dtype_keep_their_bits(peer, dtype):
    theirs = peer.made(dtype)
    if isinstance(peer, Keras):
        theirs.trainable = dtype != "float16"
    ours, back = there_and_back(importlib.import_module(peer.conversion), theirs, peer.arrays)
    if isinstance(peer, Keras):
        assert ours.trainable == theirs.trainable
        assert ours.dtype_policy.name == back.dtype_policy.name == dtype


@pytest.mark.parametrize(("peer", "mistake"), rows("wrong"))
def test_what_other_libraries_have_and_layers_have_not_is_named(peer, mistake):
    theirs = peer.made(**mistake)
    with pytest.raises(LayoutError):
        importlib.import_module(peer.conversion).from_module(theirs)


@pytest.mark.needs("tensorflow")
def test_what_keras_added_to_a_projection_is_not_lost(keras, of_keras):
    theirs = keras.layers.MultiHeadAttention(2, 4)
    theirs.build((None, None, 8), (None, None, 8))
    theirs._query_dense.enable_lora(2)
    with pytest.raises(LayoutError):
        of_keras.from_module(theirs)


@pytest.mark.needs("tensorflow")
def test_a_layer_of_keras_without_weights_and_other_layers_are_told(keras, of_keras):
    with pytest.raises(LayoutError):
        of_keras.from_module(keras.layers.MultiHeadAttention(2, 4))
    with pytest.raises(TypeError):
        of_keras.from_module(keras.layers.Dense(3))


@pytest.mark.needs("jax", "flax")
def test_params_of_linen_are_those_of_nnx_in_nested_mappings(of_jax, rng):
    import jax
    from flax import linen, traverse_util

    theirs = linen.MultiHeadDotProductAttention(3, qkv_features=12, out_features=5, param_dtype="float64")
    query, key = (jax.numpy.asarray(rng.standard_normal(shape)) for shape in ((2, 5, 7), (2, 4, 8)))
    params = theirs.init(jax.random.key(0), query, key)["params"]
    definition, parameters = from_flax(params)
    mask = rng.random((2, 5, 4)) < 0.6
    mask[..., 0] = True
    expected = theirs.apply({"params": params}, query, key, mask=mask[:, None])
    agree(definition(parameters, query, key, key, mask=mask[:, None]), expected, "flax.linen")
    flat = traverse_util.flatten_dict(params, sep=".")
    same(dict(sorted(to_flax(definition, parameters).items())), dict(sorted(flat.items())))
    with pytest.raises(TypeError):
        of_jax.from_module(theirs)
    for wrong in ({"query": params}, {"query": {"kernel": 3}}):
        with pytest.raises((LayoutError, TypeError)):
            from_flax(wrong)


@pytest.mark.needs("jax", "flax", "equinox")
def test_modules_of_other_classes_are_told_in_jax(nnx, equinox, of_jax):
    import jax

    ours = of_jax.from_module(equinox.nn.MultiheadAttention(2, 8, key=jax.random.key(0)))
    for module in (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), equinox.nn.Linear(2, 2, key=jax.random.key(0)), 3):
        with pytest.raises(TypeError):
            of_jax.from_module(module)
        with pytest.raises(TypeError):
            of_jax.to_module(ours, type(module))
