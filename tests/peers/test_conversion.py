"""Modules of other libraries as layers here and back: the same bits, and the same outputs in float64.

``AGREEMENT`` says how closely, relative to the largest output: 1e-14, but where the other library computes in float32.
"""

import importlib
import itertools

import numpy as np
import pytest

from attention_core import layers
from attention_core.layouts import LayoutError
from attention_core.parameters import Linear, MultiHeadAttention

AGREEMENT = {
    "torch.nn.MultiheadAttention": 1e-14,
    "torch.nn.TransformerEncoderLayer": 1e-14,
    "transformers BertLayer, BertEmbeddings, BertModel": 1e-14,
    "equinox.nn.MultiheadAttention": 1e-14,
    "flax.nnx.MultiHeadAttention(sow_weights=True)": 1e-14,
    "flax.nnx.MultiHeadAttention": 2e-6,  # jax.nn.dot_product_attention takes its softmax in float32
    "keras.layers.*, 1/√key_dim exact in float32": 1e-14,
    "keras.layers.*": 1e-6,  # TensorFlow rounds the Python number 1/√key_dim to float32
}
# The libraries announce what they deprecate in one another; none of it is about these numbers.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def torch():
    return importlib.import_module("torch")


@pytest.fixture(scope="module")
def of_torch(torch):
    return importlib.import_module("attention_torch.conversion")


@pytest.fixture(scope="module")
def bert(torch):
    return importlib.import_module("transformers.models.bert.modeling_bert")


@pytest.fixture(scope="module")
def keras():
    return importlib.import_module("keras")


@pytest.fixture(scope="module")
def of_keras(keras):
    return importlib.import_module("attention_tensorflow.conversion")


@pytest.fixture(scope="module")
def nnx():
    return importlib.import_module("flax.nnx")


@pytest.fixture(scope="module")
def equinox():
    return importlib.import_module("equinox")


@pytest.fixture(scope="module")
def of_jax():
    return importlib.import_module("attention_jax.conversion")


def agree(found, expected, what):
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape) == (np.float64, expected.shape)
    assert np.abs(found - expected).max() <= AGREEMENT[what] * np.abs(expected).max()


def same(found, expected):
    """Equal bit for bit, name by name."""
    assert list(found) == list(expected)
    for name, array in expected.items():
        got, wanted = np.asarray(found[name]), np.asarray(array)
        assert (name, got.dtype, got.shape) == (name, wanted.dtype, wanted.shape)
        assert got.tobytes() == wanted.tobytes(), name


def same_layer(layer, other):
    assert layer.definition == other.definition
    same(layers.named_arrays(layer.to_numpy()[0]), layers.named_arrays(other.to_numpy()[0]))


def perturbed(torch, module):
    """Every parameter random, biases and normalizations too."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return module.eval()


def state(module):
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


# --- torch.nn.MultiheadAttention: all options, all masks ---

OPTIONS = list(itertools.product((None, 10), (None, 14), *[(True, False)] * 4))


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("kdim", "vdim", "bias", "add_bias_kv", "add_zero_attn", "batch_first"), OPTIONS)
def test_multi_head_attention_of_torch(torch, of_torch, rng, kdim, vdim, bias, add_bias_kv, add_zero_attn, batch_first):
    options = {"kdim": kdim, "vdim": vdim, "bias": bias, "add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn}
    theirs = torch.nn.MultiheadAttention(12, 3, dropout=0.25, **options, batch_first=batch_first, dtype=torch.float64)
    perturbed(torch, theirs)
    ours = of_torch.from_module(theirs)
    assert (ours.training, ours.definition.dropout) == (False, 0.25)
    back = of_torch.to_module(ours, torch.nn.MultiheadAttention)
    same(state(back), state(theirs))
    same_layer(of_torch.from_module(back), ours)
    assert back.batch_first
    shapes = ((2, 5, 12), (2, 7, kdim or 12), (2, 7, vdim or 12))
    inputs = [torch.from_numpy(rng.standard_normal(shape)) for shape in shapes]
    for masks, our_masks in every_mask(torch, rng):
        found = ours(*inputs, **our_masks).detach()
        ordered = inputs if batch_first else [x.transpose(0, 1) for x in inputs]
        for weights in (True, False):
            expected = theirs(*ordered, **masks, need_weights=weights)[0].detach()
            agree(found, expected if batch_first else expected.transpose(0, 1), "torch.nn.MultiheadAttention")
        agree(found, back(*inputs, **masks)[0].detach(), "torch.nn.MultiheadAttention")


def every_mask(torch, rng):
    """Masks as PyTorch has them, True = ignore, and as they are here; no query is without a key."""
    ignored = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    pairs = torch.from_numpy(rng.random((5, 7)) < 0.4)
    pairs[:, 0] = False
    heads = torch.from_numpy(rng.random((6, 5, 7)) < 0.4)
    heads[..., 0] = False
    added = torch.from_numpy(rng.standard_normal((5, 7)))
    yield {}, {}
    yield {"key_padding_mask": ignored}, {"key_mask": ~ignored}
    yield {"attn_mask": pairs}, {"mask": ~pairs}
    yield {"attn_mask": heads, "key_padding_mask": ignored}, {"mask": ~heads.reshape(2, 3, 5, 7), "key_mask": ~ignored}
    yield {"attn_mask": added}, {"bias": added}


@pytest.mark.needs("torch")
def test_weights_of_any_dtype_keep_their_bits_in_torch(torch, of_torch):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        theirs = torch.nn.MultiheadAttention(8, 2, dtype=dtype).train()
        ours = of_torch.from_module(theirs)
        back = of_torch.to_module(ours, torch.nn.MultiheadAttention)
        assert ours.training
        assert back.training
        for name, tensor in theirs.state_dict().items():
            assert back.state_dict()[name].dtype == dtype
            assert torch.equal(back.state_dict()[name], tensor)
            assert back.get_parameter(name).requires_grad


@pytest.mark.needs("torch")
def test_what_is_converted_shares_no_memory(torch, of_torch):
    theirs = torch.nn.MultiheadAttention(8, 2)
    ours = of_torch.from_module(theirs)
    back = of_torch.to_module(ours, torch.nn.MultiheadAttention)
    kept = [parameter.detach().clone() for parameter in theirs.parameters()]
    with torch.no_grad():
        for parameter in (*ours.parameters(), *back.parameters()):
            parameter.fill_(7)
    assert all(map(torch.equal, theirs.parameters(), kept))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layer_of_torch(torch, of_torch, rng, norm_first):
    theirs = torch.nn.TransformerEncoderLayer(
        12,
        3,
        20,
        0.0,
        activation="gelu",
        layer_norm_eps=1e-6,
        batch_first=True,
        norm_first=norm_first,
        dtype=torch.float64,
    )
    perturbed(torch, theirs)
    ours = of_torch.from_module(theirs)
    back = of_torch.to_module(ours, torch.nn.TransformerEncoderLayer)
    same(state(back), state(theirs))
    same_layer(of_torch.from_module(back), ours)
    x, ignored = (
        torch.from_numpy(rng.standard_normal((2, 5, 12))),
        torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
    )
    pairs = torch.eye(5, dtype=torch.bool).roll(1, 0)
    for masks, our_masks in (
        ({}, {}),
        ({"src_mask": pairs}, {"mask": ~pairs}),
        ({"src_key_padding_mask": ignored}, {"key_mask": ~ignored}),
    ):
        for module in (theirs, back):  # with a gradient, as without one PyTorch fuses, and rounds otherwise
            agree(ours(x, **our_masks).detach(), module(x, **masks).detach(), "torch.nn.TransformerEncoderLayer")


@pytest.mark.needs("torch")
def test_what_modules_of_torch_have_and_layers_have_not_is_named(torch, of_torch):
    encoder = torch.nn.TransformerEncoderLayer
    for module, text in (
        (encoder(8, 2, dropout=0.0), "expected activation gelu"),
        (encoder(8, 2, dropout=0.1, activation="gelu"), "expected dropout 0"),
        (encoder(8, 2, dropout=0.0, activation=torch.nn.GELU("tanh")), "expected activation gelu"),
        (encoder(8, 2, dropout=0.0, activation="gelu", bias=False), "expected norm1.bias"),
    ):
        with pytest.raises(LayoutError, match=text):
            of_torch.from_module(module)

    class Derived(torch.nn.MultiheadAttention):
        pass

    for module in (Derived(8, 2), torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=r"expected a module out of torch.nn.MultiheadAttention, .*; got"):
            of_torch.from_module(module)
        with pytest.raises(TypeError, match=r"expected a module out of torch.nn.MultiheadAttention, .*; got"):
            of_torch.to_module(of_torch.from_module(torch.nn.MultiheadAttention(8, 2)), type(module))


# --- BERT ---


def config(bert, **more):
    sizes = {"vocab_size": 31, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
    sizes["hidden_size"] = more.pop("hidden_size", 12)
    return bert.BertConfig(**sizes, max_position_embeddings=9, attn_implementation="eager", **more)


@pytest.mark.needs("torch", "transformers")
def test_bert(torch, of_torch, bert, rng):
    theirs = perturbed(torch, bert.BertModel(config(bert), add_pooling_layer=False).double())
    embeddings, *encoder = ours = of_torch.from_module(theirs)
    assert embeddings.definition.epsilon == encoder[0].definition.epsilon == 1e-12
    back = of_torch.to_module(ours, bert.BertModel)
    same(state(back), state(theirs))
    for layer, again in zip(ours, of_torch.from_module(back), strict=True):
        same_layer(layer, again)
    tokens, segments = (torch.from_numpy(rng.integers(0, most, (2, 7))) for most in (31, 2))
    attended = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    x = embeddings(tokens, segment_ids=segments)
    for layer in encoder:
        x = layer(x, key_mask=attended.bool())
    for module in (theirs, back):
        expected = module(input_ids=tokens, token_type_ids=segments, attention_mask=attended).last_hidden_state
        agree(x.detach(), expected.detach(), "transformers BertLayer, BertEmbeddings, BertModel")


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize("width", [3, 8, 32, 64])
def test_berts_of_any_head_size(width, torch, of_torch, bert, rng):
    """Their scale is rounded in another way than ours for most of them."""
    theirs = perturbed(torch, bert.BertLayer(config(bert, hidden_size=3 * width)).double())
    ours, x = of_torch.from_module(theirs), torch.from_numpy(rng.standard_normal((2, 5, 3 * width)))
    found = theirs(x)
    found = found[0] if isinstance(found, tuple) else found
    agree(ours(x).detach(), found.detach(), "transformers BertLayer, BertEmbeddings, BertModel")


@pytest.mark.needs("torch")
@pytest.mark.parametrize("trained", [False, True])
def test_what_is_frozen_stays_so(trained, torch, of_torch):
    theirs = torch.nn.MultiheadAttention(8, 2).requires_grad_(trained)
    assert all(each.requires_grad is trained for each in of_torch.from_module(theirs).parameters())


@pytest.mark.needs("torch", "transformers")
def test_parts_of_bert(torch, of_torch, bert, rng):
    x = torch.from_numpy(rng.standard_normal((2, 5, 12)))
    theirs = perturbed(torch, bert.BertLayer(config(bert, layer_norm_eps=1e-7)).double())
    ours = of_torch.from_module(theirs)
    assert (ours.definition.epsilon, ours.definition.dropout) == (1e-7, 0.1)
    back = of_torch.to_module(ours, bert.BertLayer)
    same(state(back), state(theirs))
    same_layer(of_torch.from_module(back), ours)
    for module in (theirs, back):
        found = module(x)
        found = found[0] if isinstance(found, tuple) else found
        agree(ours(x).detach(), found.detach(), "transformers BertLayer, BertEmbeddings, BertModel")
    theirs = perturbed(torch, bert.BertEmbeddings(config(bert)).double())
    back = of_torch.to_module(of_torch.from_module(theirs), bert.BertEmbeddings)
    same(state(back), state(theirs))


@pytest.mark.needs("torch", "transformers")
def test_what_berts_have_and_layers_have_not_is_named(torch, of_torch, bert):
    for made, text in (
        (lambda: bert.BertModel(config(bert)), "expected a BertModel without pooler"),
        (lambda: bert.BertLayer(config(bert, hidden_act="relu")), "expected hidden_act gelu of a BERT; got relu"),
        (lambda: bert.BertLayer(config(bert, is_decoder=True)), "expected is_decoder False of a BERT; got True"),
        (
            lambda: bert.BertLayer(config(bert, hidden_dropout_prob=0.3)),
            "expected one dropout of weights .*; got 0.1, 0.3",
        ),
    ):
        with pytest.raises(LayoutError, match=text):
            of_torch.from_module(made())
    layer = of_torch.from_module(bert.BertLayer(config(bert)))
    with pytest.raises(TypeError, match=r"expected one layer for transformers.BertLayer; got 2"):
        of_torch.to_module([layer, layer], bert.BertLayer)


# --- Keras ---

KERAS = [
    {"num_heads": 3, "key_dim": 4},
    {"num_heads": 3, "key_dim": 4, "value_dim": 5, "use_bias": False, "output_shape": 6, "dropout": 0.25},
    {"num_heads": 3, "key_dim": 5},
    {"num_query_heads": 6, "num_key_value_heads": 2, "head_dim": 4},
    {"num_query_heads": 6, "num_key_value_heads": 1, "head_dim": 16, "use_bias": False},
    {"num_query_heads": 6, "num_key_value_heads": 3, "head_dim": 5, "dropout": 0.25},
]


def weights(module):
    found = {variable.path.split("/", 1)[1]: np.asarray(variable) for variable in module.weights}
    return {name: array for name, array in found.items() if name.endswith(("kernel", "bias"))}


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
        ours = of_keras.from_module(theirs)
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


# --- flax and equinox ---

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
        for module in (theirs, back):
            exact = module(query, key, value, mask=our_mask, sow_weights=True)
            agree(found, exact, "flax.nnx.MultiHeadAttention(sow_weights=True)")
            agree(found, module(query, key, value, mask=our_mask), "flax.nnx.MultiHeadAttention")


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
        for module in (theirs, back):
            agree(
                found,
                module(*inputs, None if our_mask is None else jax.numpy.asarray(our_mask)),
                "equinox.nn.MultiheadAttention",
            )


@pytest.mark.needs("jax", "equinox")
def test_bits_of_equinox(equinox, of_jax):
    import jax

    for dtype in ("float16", "bfloat16", "float32"):
        theirs = equinox.nn.MultiheadAttention(2, 8, use_key_bias=True, dtype=dtype, key=jax.random.key(1))
        same(leaves(of_jax.to_module(of_jax.from_module(theirs), type(theirs))), leaves(theirs))


@pytest.mark.needs("jax", "flax", "equinox")
def test_modules_of_other_classes_are_told_in_jax(nnx, equinox, of_jax):
    import jax

    ours = of_jax.from_module(equinox.nn.MultiheadAttention(2, 8, key=jax.random.key(0)))
    for module in (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), equinox.nn.Linear(2, 2, key=jax.random.key(0)), 3):
        with pytest.raises(TypeError, match=r"expected a module out of flax.nnx.MultiHeadAttention, equinox.*; got"):
            of_jax.from_module(module)
        with pytest.raises(TypeError, match=r"expected a module out of flax.nnx.MultiHeadAttention, equinox.*; got"):
            of_jax.to_module(ours, type(module))


# --- from one framework to another ---


@pytest.mark.needs("torch", "tensorflow", "jax", "flax", "equinox")
def test_a_module_of_one_framework_is_one_of_every_other(torch, of_torch, keras, of_keras, nnx, equinox, of_jax, rng):
    """Over NumPy and back again: the bits of `torch.nn.MultiheadAttention` stay."""
    import attention_jax
    import attention_tensorflow
    import attention_torch

    theirs = perturbed(torch, torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64))
    layer = of_torch.from_module(theirs)
    x = rng.standard_normal((5, 12))
    expected = theirs(*[torch.from_numpy(x)[None]] * 3)[0].detach()[0]

    in_keras = attention_tensorflow.MultiHeadAttention.from_numpy(layer.definition, *layer.to_numpy())
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
    import attention_tensorflow
    import attention_torch

    options = {"channels": 8, "num_heads": 2, "softcap": 3.0}
    for layer, convert, kind in (
        (attention_torch.MultiHeadAttention(**options), of_torch.to_module, torch.nn.MultiheadAttention),
        (attention_tensorflow.MultiHeadAttention(**options), of_keras.to_module, keras.layers.MultiHeadAttention),
        (attention_jax.MultiHeadAttention.init(0, **options), of_jax.to_module, nnx.MultiHeadAttention),
    ):
        with pytest.raises(LayoutError, match=r"expected softcap None for .*; got 3.0"):
            convert(layer, kind)


@pytest.mark.needs("torch")
def test_one_projection_per_head_is_a_module_of_torch(torch, of_torch, rng):
    """Heads kept apart, each a triple of linear maps, joined and passed on."""
    from attention_core.layouts import join_heads, separate_heads
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
