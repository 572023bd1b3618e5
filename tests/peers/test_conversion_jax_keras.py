"""Modules of Keras, flax and equinox as layers here and back: the same bits and outputs."""

import importlib

import numpy as np
import pytest
from conversion_helpers import agree, perturbed, same, same_layer, state, weights

from attention_core import layers
from attention_core.parameters import Linear, MultiHeadAttention
from attention_models.layouts import LayoutError, from_flax, to_flax

# The libraries announce what they deprecate in one another; none of it is about these numbers.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def torch():
    return importlib.import_module("torch")


@pytest.fixture(scope="module")
def of_torch(torch):
    return importlib.import_module("attention_models.torch.conversion")


@pytest.fixture(scope="module")
def keras():
    return importlib.import_module("keras")


@pytest.fixture(scope="module")
def of_keras(keras):
    return importlib.import_module("attention_models.keras.conversion")


@pytest.fixture(scope="module")
def nnx():
    return importlib.import_module("flax.nnx")


@pytest.fixture(scope="module")
def equinox():
    return importlib.import_module("equinox")


@pytest.fixture(scope="module")
def of_jax():
    return importlib.import_module("attention_models.jax.conversion")


KERAS = [
    {"num_heads": 3, "key_dim": 4},
    {"num_heads": 3, "key_dim": 4, "value_dim": 5, "use_bias": False, "output_shape": 6, "dropout": 0.25},
    {"num_heads": 3, "key_dim": 5},
    {"num_query_heads": 6, "num_key_value_heads": 2, "head_dim": 4},
    {"num_query_heads": 6, "num_key_value_heads": 1, "head_dim": 16, "use_bias": False},
    {"num_query_heads": 6, "num_key_value_heads": 3, "head_dim": 5, "dropout": 0.25},
]


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("options", KERAS, ids=lambda options: "-".join(map(str, options.values())))
def test_multi_head_attention_of_keras(keras, of_keras, rng, options):
    grouped = "head_dim" in options
    kind = keras.layers.GroupQueryAttention if grouped else keras.layers.MultiHeadAttention
    theirs = kind(**options, dtype="float64", bias_initializer="random_normal")
    query, key, value = (rng.standard_normal(shape) for shape in ((2, 5, 12), (2, 7, 10), (2, 7, 14)))
    theirs.build(query.shape, value.shape, key.shape)
    ours = of_keras.from_module(theirs)
    assert ours.definition.dropout == options.get("dropout", 0.0)
    back = of_keras.to_module(ours, kind)
    same(weights(back), weights(theirs))
    same_layer(of_keras.from_module(back), ours)
    mask = rng.random((2, 5, 7)) < 0.6
    mask[..., 0] = True
    causal = {"attention_mask": mask, "use_causal_mask": True}
    width = options.get("head_dim", options.get("key_dim"))
    what = "keras.layers.*, 1/√key_dim exact in float32" if width in (4, 16) else "keras.layers.*"
    for masks, our_masks in (
        ({}, {}),
        ({"attention_mask": mask}, {"mask": mask[:, None]}),
        (causal, {"mask": mask[:, None] & np.tri(5, 7, dtype=bool)}),
    ):
        found = np.asarray(ours(query, key, value, **our_masks))
        for module in (theirs, back):
            agree(found, module(query, value, key, **masks), what)


@pytest.mark.needs("tensorflow")
def test_dtype_policies_and_bits_of_keras(keras, of_keras):
    for dtype in ("float16", "bfloat16", "float32", "mixed_bfloat16"):
        theirs = keras.layers.MultiHeadAttention(2, 4, dtype=dtype)
        theirs.build((None, None, 8), (None, None, 8))
        theirs.trainable = dtype != "float16"
        ours = of_keras.from_module(theirs)
        assert ours.trainable == theirs.trainable
        back = of_keras.to_module(ours, keras.layers.MultiHeadAttention)
        assert ours.dtype_policy.name == back.dtype_policy.name == dtype
        same(weights(back), weights(theirs))


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"use_gate": True}, "use_gate"),
        ({"sliding_window": 3}, "expected no sliding_window"),
        ({"kernel_regularizer": "l2"}, "expected no kernel_regularizer"),
        ({"bias_constraint": "non_neg"}, "expected no bias_constraint"),
        ({"attention_axes": (1, 2)}, "expected attention_axes"),
        ({"output_shape": (3, 4)}, "expected attention_output/kernel"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_what_layers_of_keras_have_and_ours_have_not_is_named(keras, of_keras, options, text):
    theirs = keras.layers.MultiHeadAttention(2, 4, **options)
    theirs.build((None, None, None, 8), (None, None, None, 8)) if "attention_axes" in options else theirs.build(
        (None, None, 8), (None, None, 8)
    )
    with pytest.raises(LayoutError, match=text):
        of_keras.from_module(theirs)


@pytest.mark.needs("tensorflow")
def test_what_keras_added_to_a_projection_is_not_lost(keras, of_keras):
    theirs = keras.layers.MultiHeadAttention(2, 4)
    theirs.build((None, None, 8), (None, None, 8))
    theirs._query_dense.enable_lora(2)
    with pytest.raises(LayoutError, match="lora"):
        of_keras.from_module(theirs)


@pytest.mark.needs("tensorflow")
def test_a_layer_of_keras_without_weights_and_other_layers_are_told(keras, of_keras):
    with pytest.raises(LayoutError, match="has not been built"):
        of_keras.from_module(keras.layers.MultiHeadAttention(2, 4))
    with pytest.raises(TypeError, match=r"expected a layer out of keras.layers.MultiHeadAttention, .*; got Dense"):
        of_keras.from_module(keras.layers.Dense(3))


FLAX = [
    {"num_heads": 3, "in_features": 12},
    {"num_heads": 3, "in_features": 12, "qkv_features": 15, "out_features": 8, "in_kv_features": 10, "use_bias": False},
    {"num_heads": 6, "in_features": 12, "num_kv_heads": 2},
    {"num_heads": 6, "in_features": 12, "num_kv_heads": 3, "qkv_features": 24, "in_kv_features": 10},
]


def variables(nnx, module):
    flat = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    return {f"{name}.{part}": np.asarray(flat[name][part]) for name in sorted(flat) for part in sorted(flat[name])}


@pytest.mark.needs("jax", "flax")
@pytest.mark.parametrize("options", FLAX, ids=lambda options: "-".join(map(str, options.values())))
def test_multi_head_attention_of_flax(nnx, of_jax, rng, options):
    import jax

    theirs = nnx.MultiHeadAttention(
        **options, param_dtype="float64", decode=False, bias_init=nnx.initializers.normal(0.3), rngs=nnx.Rngs(0)
    )
    ours = of_jax.from_module(theirs)
    back = of_jax.to_module(ours, nnx.MultiHeadAttention)
    same(variables(nnx, back), variables(nnx, theirs))
    same_layer(of_jax.from_module(back), ours)
    width = options.get("in_kv_features", 12)
    query, key, value = (
        jax.numpy.asarray(rng.standard_normal(shape)) for shape in ((2, 5, 12), (2, 7, width), (2, 7, width))
    )
    mask = rng.random((2, 1, 5, 7)) < 0.6
    mask[..., 0] = True
    for our_mask in (None, np.broadcast_to(mask, (2, options["num_heads"], 5, 7))):
        found = ours(query, key, value, **({} if our_mask is None else {"mask": our_mask}))
        exact = theirs(query, key, value, mask=our_mask, sow_weights=True)
        agree(found, exact, "flax.nnx.MultiHeadAttention(sow_weights=True)")
        agree(found, theirs(query, key, value, mask=our_mask), "flax.nnx.MultiHeadAttention")
    agree(found, back(query, key, value, mask=our_mask), "flax.nnx.MultiHeadAttention")


@pytest.mark.needs("jax", "flax")
def test_dropout_and_bits_of_flax(nnx, of_jax):
    for dtype in ("float16", "bfloat16", "float32"):
        theirs = nnx.MultiHeadAttention(
            2, 8, param_dtype=dtype, dropout_rate=0.25, broadcast_dropout=False, decode=False, rngs=nnx.Rngs(0)
        )
        ours = of_jax.from_module(theirs)
        back = of_jax.to_module(ours, nnx.MultiHeadAttention)
        assert ours.definition.dropout == back.dropout_rate == 0.25
        same(variables(nnx, back), variables(nnx, theirs))


@pytest.mark.needs("jax", "flax")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"normalize_qk": True}, "normalize_qk"),
        ({"dropout_rate": 0.1}, "expected broadcast_dropout False"),
        ({"attention_fn": len}, "expected attention_fn nnx.dot_product_attention"),
        ({"qkv_dot_general": len}, "expected qkv_dot_general None"),
        ({"precision": "highest"}, "expected precision None"),
        ({"decode": True}, "expected decode False"),
        ({"dtype": "bfloat16"}, "expected dtype None or"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_what_flax_has_and_layers_have_not_is_named(nnx, of_jax, options, text):
    with pytest.raises(LayoutError, match=text):
        of_jax.from_module(nnx.MultiHeadAttention(2, 8, **options, rngs=nnx.Rngs(0)))


EQUINOX = [
    {},
    {"use_query_bias": True, "use_key_bias": True, "use_value_bias": True, "use_output_bias": True},
    {"use_query_bias": True, "key_size": 10, "value_size": 14, "output_size": 8, "qk_size": 5, "vo_size": 6},
    {"use_output_bias": True, "dropout_p": 0.25},
]


def leaves(module):
    parts = ((f"{name}_proj", part) for name in ("query", "key", "value", "output") for part in ("weight", "bias"))
    found = {f"{name}.{part}": getattr(getattr(module, name), part) for name, part in parts}
    return {name: np.asarray(array) for name, array in found.items() if array is not None}


@pytest.mark.needs("jax", "equinox")
@pytest.mark.parametrize("options", EQUINOX, ids=lambda options: "-".join(options))
def test_multi_head_attention_of_equinox(equinox, of_jax, rng, options):
    import jax

    kind = equinox.nn.MultiheadAttention
    theirs = equinox.nn.inference_mode(kind(3, 12, **options, dtype="float64", key=jax.random.key(1)))
    ours = of_jax.from_module(theirs)
    back = of_jax.to_module(ours, kind)
    assert ours.definition.dropout == back.dropout.p == options.get("dropout_p", 0.0)
    back = equinox.nn.inference_mode(back)
    same(leaves(back), leaves(theirs))
    same_layer(of_jax.from_module(back), ours)
    sizes = ((5, 12), (7, options.get("key_size", 12)), (7, options.get("value_size", 12)))
    inputs = [jax.numpy.asarray(rng.standard_normal(shape)) for shape in sizes]
    mask = rng.random((3, 5, 7)) < 0.6
    mask[..., 0] = True
    for our_mask in (None, mask[0], mask):
        found = ours(*inputs, **({} if our_mask is None else {"mask": our_mask}))
        their_mask = None if our_mask is None else jax.numpy.asarray(our_mask)
        agree(found, theirs(*inputs, their_mask), "equinox.nn.MultiheadAttention")
    agree(found, back(*inputs, their_mask), "equinox.nn.MultiheadAttention")


@pytest.mark.needs("jax", "equinox")
def test_bits_of_equinox(equinox, of_jax):
    import jax

    for dtype in ("float16", "bfloat16", "float32"):
        theirs = equinox.nn.MultiheadAttention(2, 8, use_key_bias=True, dtype=dtype, key=jax.random.key(1))
        same(leaves(of_jax.to_module(of_jax.from_module(theirs), type(theirs))), leaves(theirs))


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
    with pytest.raises(TypeError, match=r"got MultiHeadDotProductAttention: .*from_flax reads its params"):
        of_jax.from_module(theirs)
    for wrong, text in (
        ({"query": params}, "expected query.kernel of"),
        ({"query": {"kernel": 3}}, "as an array; got int"),
    ):
        with pytest.raises((LayoutError, TypeError), match=text):
            from_flax(wrong)


@pytest.mark.needs("jax", "flax", "equinox")
def test_modules_of_other_classes_are_told_in_jax(nnx, equinox, of_jax):
    import jax

    ours = of_jax.from_module(equinox.nn.MultiheadAttention(2, 8, key=jax.random.key(0)))
    for module in (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), equinox.nn.Linear(2, 2, key=jax.random.key(0)), 3):
        with pytest.raises(TypeError, match=r"expected a module out of flax.nnx.MultiHeadAttention, equinox.*; got"):
            of_jax.from_module(module)
        with pytest.raises(TypeError, match=r"expected a module out of flax.nnx.MultiHeadAttention, equinox.*; got"):
            of_jax.to_module(ours, type(module))


@pytest.mark.needs("torch", "tensorflow", "jax", "flax", "equinox")
def test_a_module_of_one_framework_is_one_of_every_other(torch, of_torch, keras, of_keras, nnx, equinox, of_jax, rng):
    """Over NumPy and back again: the bits of `torch.nn.MultiheadAttention` stay."""
    import attention_jax
    import attention_keras
    import attention_torch

    theirs = perturbed(torch, torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64))
    layer = of_torch.from_module(theirs)
    x = rng.standard_normal((5, 12))
    expected = theirs(*[torch.from_numpy(x)[None]] * 3)[0].detach()[0]

    in_keras = attention_keras.MultiHeadAttention.from_numpy(layer.definition, *layer.to_numpy())
    module = of_keras.to_module(in_keras, keras.layers.MultiHeadAttention)
    agree(np.asarray(module(x[None], x[None]))[0], expected, "keras.layers.*, 1/√key_dim exact in float32")

    in_jax = attention_jax.Layer.from_numpy(layer.definition, *of_keras.from_module(module).to_numpy())
    in_flax = of_jax.to_module(in_jax, nnx.MultiHeadAttention)
    agree(in_flax(x[None], sow_weights=True)[0], expected, "flax.nnx.MultiHeadAttention(sow_weights=True)")

    last = of_jax.to_module(of_jax.from_module(in_flax), equinox.nn.MultiheadAttention)
    agree(last(x, x, x), expected, "equinox.nn.MultiheadAttention")
    home = attention_torch.Layer.from_numpy(layer.definition, *of_jax.from_module(last).to_numpy())
    same(state(of_torch.to_module(home, torch.nn.MultiheadAttention)), state(theirs))


@pytest.mark.needs("torch", "tensorflow", "jax", "flax")
def test_settings_without_a_place_are_named_by_every_framework(torch, of_torch, keras, of_keras, nnx, of_jax):
    import attention_jax
    import attention_keras
    import attention_torch

    options = {"channels": 8, "num_heads": 2, "softcap": 3.0}
    for layer, convert, kind in (
        (attention_torch.MultiHeadAttention(**options), of_torch.to_module, torch.nn.MultiheadAttention),
        (attention_keras.MultiHeadAttention(**options), of_keras.to_module, keras.layers.MultiHeadAttention),
        (attention_jax.MultiHeadAttention.init(0, **options), of_jax.to_module, nnx.MultiHeadAttention),
    ):
        with pytest.raises(LayoutError, match=r"expected softcap None for .*; got 3.0"):
            convert(layer, kind)


@pytest.mark.needs("torch")
def test_one_projection_per_head_is_a_module_of_torch(torch, of_torch, rng):
    """Heads kept apart, each a triple of linear maps, joined and passed on."""
    from attention_models.layouts import join_heads, separate_heads
    from attention_torch import Layer

    heads = [tuple(Linear(rng.standard_normal((8, 4)), rng.standard_normal(4)) for _ in range(3)) for _ in range(2)]
    joined = join_heads(heads, Linear(rng.standard_normal((8, 8)), rng.standard_normal(8)))
    module = of_torch.to_module(Layer.from_numpy(layers.MultiHeadAttention(8, 2), joined), torch.nn.MultiheadAttention)
    x = rng.standard_normal((2, 5, 8))
    parts = [
        np.asarray(layers.MultiHeadAttention(8, 1, head_dim=4, output=False)(MultiHeadAttention(*head), x))
        for head in heads
    ]
    expected = np.concatenate(parts, axis=-1) @ joined.output.weight + joined.output.bias
    agree(module(*[torch.from_numpy(x)] * 3)[0].detach(), expected, "torch.nn.MultiheadAttention")
    again, _ = separate_heads(of_torch.from_module(module).to_numpy()[0], 2)
    for head, other in zip(again, heads, strict=True):
        same(layers.named_arrays(MultiHeadAttention(*head)), layers.named_arrays(MultiHeadAttention(*other)))
