"""Layouts of other libraries, on the arrays of every backend: there and back bit for bit, and nothing lost silently."""

import dataclasses
import functools

import numpy as np
import pytest
from backend_helpers import assert_same_tree
from pairwise import covering

import attention_models as models
from attention_core import layers, multi_head_attention
from attention_core.parameters import Linear, MultiHeadAttention
from attention_models.layouts import LAYOUTS, LayoutError

ATTENTION = layers.MultiHeadAttention
BERT = (
    layers.Embeddings(11, 7, 12, num_segments=2, dropout=0.1),
    layers.EncoderLayer(12, 3, 20, norm_first=False, epsilon=1e-12, dropout=0.1),
    layers.EncoderLayer(12, 3, 20, norm_first=False, epsilon=1e-12, dropout=0.1),
)
OF_TORCH = {
    "norm": "layer", "gated": False, "attention_bias": True, "feed_forward_bias": True, "rotary_base": None, "memory_channels": 12,
}  # fmt: skip
SIZES = {"vocab_size": 11, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6}
CONFIG = SIZES | {"model_type": "llama", "num_key_value_heads": 3, "original_max_position_embeddings": 6}
LISTS = {"short_factor": [2.0], "long_factor": [2.0], "attention_factor": 1.0}
TURNS = {"low_freq_factor": 1, "high_freq_factor": 4}
# What a config adds to a Llama, as settings and in its own words.
CONFIGS = [
    ({}, {}),
    ({}, {"rope_scaling": {"rope_type": "yarn", "factor": 4, "attention_factor": 1.0}}),
    ({"rotary_divisors": (8.0,)}, {"rope_scaling": {"rope_type": "llama3", "factor": 8, **TURNS}}),
    ({"rotary_divisors": (2.0,)}, {"rope_scaling": {"rope_type": "longrope", **LISTS}}),
    ({"rotary_divisors": (2.0,), "epsilon": 1e-5}, {"model_type": "phi3", "rope_scaling": {"type": "su", **LISTS}}),
    ({"window": 3}, {"model_type": "mistral", "sliding_window": 3}),
]
# What each layout can say, and with which arguments arrays are read back.
CASES = {
    "torch": [
        (
            ATTENTION(12, 3, key_channels=key, value_channels=value, bias=bias, zero_attention=zero, dropout=0.1),
            {"num_heads": 3, "zero_attention": zero, "dropout": 0.1},
        )
        for key, value, bias, zero in covering((None, 5), (None, 7), (True, False), (True, False))
    ],
    "keras": [
        (ATTENTION(12, 3), {}),
        (ATTENTION(12, 5, key_channels=7, value_channels=9, head_dim=4, value_head_dim=6, output_channels=8, bias=False, dropout=0.2), {"num_heads": 5, "dropout": 0.2}),
    ],
    "keras-grouped": [
        (ATTENTION(12, 6, groups, key_channels=7, value_channels=9, head_dim=4, bias=bias), {})
        for groups, bias in covering((1, 2, 3, None), (True, False))
    ],
    "flax": [
        (ATTENTION(12, 6, groups, key_channels=7, head_dim=4, output_channels=8, bias=bias, dropout=0.3), {"dropout": 0.3})
        for groups, bias in covering((1, 2, 3, None), (True, False))
    ],
    "equinox": [
        (
            ATTENTION(12, 3, key_channels=7, value_channels=9, head_dim=5, value_head_dim=6, output_channels=8, **biases, dropout=0.1),
            {"num_heads": 3, "dropout": 0.1},
        )
        for biases in (
            {}, {"bias": False}, {"query_bias": False}, {"key_bias": False, "output_bias": False},
            {"query_bias": False, "key_bias": False, "value_bias": False},
        )
    ],
    "torch-encoder-layer": [
        (
            layers.EncoderLayer(12, 3, 20, norm_first=first, epsilon=1e-6, activation=activation),
            {"num_heads": 3, "norm_first": first, "epsilon": 1e-6} | ({} if activation == "relu" else {"activation": "gelu"}),
        )
        for first, activation in ((True, "gelu"), (False, "relu"))
    ],
    "torch-decoder-layer": [
        (
            layers.DecoderLayer(12, 3, 20, **OF_TORCH, norm_first=first, epsilon=1e-6, activation=activation),
            {"num_heads": 3, "norm_first": first, "epsilon": 1e-6} | ({} if activation == "relu" else {"activation": "gelu"}),
        )
        for first, activation in ((True, "gelu"), (False, "relu"))
    ],
    "bert-layer": [(BERT[1], {"num_heads": 3, "dropout": 0.1})],
    "bert-embeddings": [(BERT[0], {"dropout": 0.1})],
    "bert": [(BERT, {"num_heads": 3, "dropout": 0.1})],
    "causal-lm": [
        (models.Decoder(11, 12, 6, 20, 2, num_key_value_heads=3, tied=False, **settings), {"config": CONFIG | more})
        for settings, more in CONFIGS
    ],
}  # fmt: skip
EVERY = [(name, *case) for name, cases in CASES.items() for case in cases]


def drawn(tree, rng):
    """Replace specs of parameters by distinct numbers."""
    if isinstance(tree, tuple):
        branches = [drawn(branch, rng) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else tuple(branches)
    return None if tree is None else rng.standard_normal(tree.dims)


def with_another_axis(tree):
    """The tree with one axis more in its first array."""
    if not isinstance(tree, tuple):
        return tree[..., None]
    first = with_another_axis(tree[0])
    return type(tree)(first, *tree[1:]) if hasattr(tree, "_fields") else (first, *tree[1:])


def wanted(definition):
    if isinstance(definition, tuple):
        return tuple(each.parameters for each in definition)
    return definition.parameters


@pytest.mark.parametrize(
    ("name", "definition", "options"), EVERY, ids=lambda each: each if isinstance(each, str) else ""
)
def test_there_and_back_is_where_it_was_bit_for_bit(rng, put, get, name, definition, options):
    tree = drawn(wanted(definition), rng)
    arrays = LAYOUTS[name].write(definition, put(tree))
    found, again = LAYOUTS[name].read(arrays, **options)
    assert found == definition
    assert_same_tree(get(again), tree)
    twice = get(LAYOUTS[name].write(found, again))
    arrays = get(arrays)
    assert list(twice) == list(arrays)
    assert_same_tree(tuple(twice.values()), tuple(arrays.values()))


@pytest.mark.parametrize("name", CASES)
def test_arrays_missing_or_unknown_are_told(rng, name):
    definition, options = CASES[name][0]
    arrays = LAYOUTS[name].write(definition, drawn(wanted(definition), rng))
    for missing in arrays:
        less = {each: array for each, array in arrays.items() if each != missing}
        if missing in ("out_proj.bias", "in_proj_bias") or (
            missing.endswith("bias") and name in ("equinox", "keras", "keras-grouped", "flax")
        ):
            continue  # there a layer without it is one, too
        with pytest.raises(LayoutError):
            LAYOUTS[name].read(less, **options)
    with pytest.raises(LayoutError):
        LAYOUTS[name].read({**arrays, "more": np.zeros(1)}, **options)
    with pytest.raises(LayoutError):
        LAYOUTS[name].read({}, **options)


@pytest.mark.parametrize("name", CASES)
def test_arrays_of_other_shapes_are_told(rng, name):
    definition, options = CASES[name][0]
    arrays = LAYOUTS[name].write(definition, drawn(wanted(definition), rng))
    for each, array in arrays.items():
        for wrong in (array[..., None], np.concatenate([array, array[-1:]])):
            if wrong.ndim == array.ndim and ("_embeddings" in each or each[:-7] in ("query", "key", "value")):
                continue  # a table of one row more, or a kernel from one channel more
            with pytest.raises(ValueError):
                LAYOUTS[name].read({**arrays, each: wrong}, **options)


@pytest.mark.parametrize("name", CASES)
def test_what_is_no_array_is_named(rng, put, name):
    definition, settings = CASES[name][0]
    arrays = LAYOUTS[name].write(definition, put(drawn(wanted(definition), rng)))
    first = min(arrays)
    for wrong in (1.5, True, [1.0], Linear(next(iter(arrays.values())))):
        with pytest.raises(TypeError):
            LAYOUTS[name].read(arrays | {first: wrong}, **settings)
    with pytest.raises(TypeError):
        LAYOUTS[name].read({3: arrays[first]}, **settings)
    with pytest.raises(TypeError):
        LAYOUTS[name].read(list(arrays), **settings)


REFUSED = {
    "scale": ATTENTION(12, 3, scale=1.0),
    "softcap": ATTENTION(12, 3, softcap=2.0),
    "is_causal": ATTENTION(12, 3, is_causal=True),
    "output": ATTENTION(12, 3, output=False),
}
MORE = {
    "torch": {
        "num_key_value_heads": ATTENTION(12, 6, 2),
        "head_dim": ATTENTION(12, 3, head_dim=5),
        "value_head_dim": ATTENTION(12, 3, value_head_dim=5),
        "output_channels": ATTENTION(12, 3, output_channels=5),
        "a bias on all": ATTENTION(12, 3, key_bias=False),
    },
    "keras": {
        "num_key_value_heads": ATTENTION(12, 6, 2),
        "zero_attention": ATTENTION(12, 3, zero_attention=True),
        "a bias on all": ATTENTION(12, 3, output_bias=False),
    },
    "keras-grouped": {
        "value_head_dim": ATTENTION(12, 6, 2, value_head_dim=3),
        "output_channels": ATTENTION(12, 6, 2, output_channels=5),
        "zero_attention": ATTENTION(12, 3, zero_attention=True),
        "a bias on all": ATTENTION(12, 3, query_bias=False),
    },
    "flax": {
        "value_head_dim": ATTENTION(12, 6, 2, value_head_dim=3),
        "value_channels": ATTENTION(12, 6, 2, value_channels=5),
        "zero_attention": ATTENTION(12, 3, zero_attention=True),
        "a bias on all": ATTENTION(12, 3, value_bias=False),
    },
    "equinox": {
        "num_key_value_heads": ATTENTION(12, 6, 2),
        "zero_attention": ATTENTION(12, 3, zero_attention=True),
    },
    "torch-encoder-layer": {"dropout": layers.EncoderLayer(12, 3, 5, dropout=0.1), "norm1 without": layers.EncoderLayer(12, 3, 5, bias=False)},
    "torch-decoder-layer": {
        "norm layer": layers.DecoderLayer(12, 3, 5, **OF_TORCH | {"norm": "rms"}),
        "gated False": layers.DecoderLayer(12, 3, 5, **OF_TORCH | {"gated": True}),
        "memory_channels 12": layers.DecoderLayer(12, 3, 5, **OF_TORCH | {"memory_channels": 10}),
        "feed_forward_bias True": layers.DecoderLayer(12, 3, 5, **OF_TORCH | {"feed_forward_bias": False}),
        "window None": layers.DecoderLayer(12, 3, 5, **OF_TORCH, window=2),
        "dropout": layers.DecoderLayer(12, 3, 5, **OF_TORCH, dropout=0.1),
    },
    "bert-layer": {"norm_first": layers.EncoderLayer(12, 3, 5), "bias": layers.EncoderLayer(12, 3, 5, norm_first=False, bias=False)},
    "bert-embeddings": {"num_segments": layers.Embeddings(5, 4, 3), "norm": layers.Embeddings(5, 4, 3, 2, norm=False)},
}  # fmt: skip
UNSAID = [
    (name, setting, definition)
    for name, settings in MORE.items()
    for setting, definition in (
        settings | (REFUSED if name in ("torch", "keras", "keras-grouped", "flax", "equinox") else {})
    ).items()
]


@pytest.mark.parametrize(
    ("name", "setting", "definition"), UNSAID, ids=lambda each: each if isinstance(each, str) else ""
)
def test_a_setting_that_a_layout_has_no_place_for_is_named(rng, name, setting, definition):
    tree = drawn(definition.parameters, rng)
    with pytest.raises(LayoutError):
        LAYOUTS[name].write(definition, tree)
    if setting == "norm1 without":  # an array that the module lacks, and no setting
        return
    with pytest.raises(LayoutError):
        LAYOUTS[name].arguments(definition)


@pytest.mark.parametrize("name", CASES)
def test_a_layout_says_its_arguments_and_refuses_what_does_not_fit(rng, name):
    assert set(CASES) == set(LAYOUTS)
    for definition, _ in CASES[name]:
        assert LAYOUTS[name].arguments(definition)
    with pytest.raises(LayoutError):
        LAYOUTS[name].write(layers.RMSNorm(4), ())
    definition, _ = CASES[name][0]
    with pytest.raises(ValueError):
        LAYOUTS[name].write(definition, with_another_axis(drawn(wanted(definition), rng)))


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("keras", {"gate/kernel": np.zeros((12, 3, 4))}),
        ("keras-grouped", {"gate/kernel": np.zeros((12, 3, 4))}),
        ("flax", {"query_ln.scale": np.zeros(4), "key_ln.scale": np.zeros(4)}),
        ("bert", {"encoder.layer.0.attention.self.distance_embedding.weight": np.zeros((7, 4))}),
        ("bert", {"embeddings.LayerNorm.gamma": np.zeros(12)}),
        *((name, {f"{prefix}bias_k": np.zeros((1, 1, 12)), f"{prefix}bias_v": np.zeros((1, 1, 12))})
          for name, prefix in (("torch", ""), ("torch-encoder-layer", "self_attn."), ("torch-decoder-layer", "multihead_attn."))),
    ],
)  # fmt: skip
def test_arrays_that_have_no_place_here_are_named(rng, name, extra):
    definition, options = CASES[name][0]
    arrays = LAYOUTS[name].write(definition, drawn(wanted(definition), rng))
    with pytest.raises(LayoutError):
        LAYOUTS[name].read({**arrays, **extra}, **options)


def test_bert_is_read_with_its_prefix_and_positions(rng):
    tree = drawn(wanted(BERT), rng)
    arrays = LAYOUTS["bert"].write(BERT, tree)
    former = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    named = {f"bert.{name}": array for name, array in arrays.items()}
    named["bert.embeddings.position_ids"] = np.arange(7)[None]
    for old, new in former.items():
        named = {name.replace(old, new): array for name, array in named.items()}
    found, again = LAYOUTS["bert"].read(named, num_heads=3, dropout=0.1)
    assert found == BERT
    assert_same_tree(again, tree)


def test_positions_of_roberta_begin_behind_its_row_of_zeros(rng):
    tree = drawn(wanted(BERT), rng)
    arrays = LAYOUTS["bert"].write(BERT, tree)
    name = "embeddings.position_embeddings.weight"
    table = np.concatenate([rng.standard_normal((3, 12)), arrays[name]])
    read = functools.partial(LAYOUTS["bert"].read, num_heads=3, dropout=0.1)
    assert_same_tree(read({**arrays, name: table}, padding_idx=2)[1], tree)
    table[1] = 0
    found, again = read({**arrays, name: table})
    assert found[0].num_positions == 8
    np.testing.assert_array_equal(again[0].position, table[2:])
    assert read({**arrays, name: table}, padding_idx=-1)[0][0].num_positions == 10
    with pytest.raises(LayoutError):
        read({**arrays, name: table + 1})
    with pytest.raises(ValueError):
        read({**arrays, name: table}, padding_idx=9)


def test_layers_of_a_bert_that_differ_are_told(rng):
    other = dataclasses.replace(BERT[1], epsilon=1e-5)
    definitions = (*BERT[:2], other)
    with pytest.raises(LayoutError):
        LAYOUTS["bert"].write(definitions, drawn(wanted(definitions), rng))
    with pytest.raises(LayoutError):
        LAYOUTS["bert"].write(BERT[:1], drawn(wanted(BERT[:1]), rng))
    with pytest.raises(ValueError):
        LAYOUTS["bert"].write(BERT, drawn(wanted(BERT[:2]), rng))


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_grouped_heads_share_keys_in_order(rng, put, get, groups):
    """Against heads that each have a copy of their key."""
    heads, width = 6, 4
    kernels = {
        name: rng.standard_normal((12, count, width))
        for name, count in (("query", heads), ("key", groups), ("value", groups))
    }
    out, x = rng.standard_normal((heads, width, 12)), rng.standard_normal((2, 5, 12))
    arrays = {**{f"{name}.kernel": kernel for name, kernel in kernels.items()}, "out.kernel": out}
    apart = [kernels["query"], *(np.repeat(kernels[name], heads // groups, axis=1) for name in ("key", "value"))]
    joined = MultiHeadAttention(*(Linear(each.reshape(12, -1)) for each in apart), Linear(out.reshape(-1, 12)))
    expected = multi_head_attention(joined, x, num_heads=heads)
    definition, tree = LAYOUTS["flax"].read(put(arrays))
    assert definition.groups == groups
    np.testing.assert_allclose(get(definition(tree, put(x))), expected, rtol=0, atol=1e-14 * np.abs(expected).max())
