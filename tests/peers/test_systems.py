"""Eleven systems, each written from its description in NumPy and float64, against the layer that it becomes here.

``python tests/peers/test_systems.py`` prints how far the layers of every framework are from the descriptions, as a table.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("JAX_ENABLE_X64", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest

import attention_core as ac
from attention_core import layers
from attention_core.backend import get_backend
from attention_models.layouts import join_heads

LAYERS = {"torch": "attention_torch", "jax": "attention_jax", "tensorflow": "attention_keras"}
BOUND = 1e-12


@dataclass
class Trial:
    """One call of a layer, and what it must give."""

    definition: layers.Layer
    parameters: Any
    inputs: tuple[Any, ...]
    expected: Any
    options: dict[str, Any] = field(default_factory=dict)
    state: Any = ()


def softmax(scores):
    """Over the last axis; a row of -inf becomes nan."""
    with np.errstate(invalid="ignore"):
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)


def dense(rng, rows, columns, bias=True):
    return ac.parameters.Linear(
        rng.normal(size=(rows, columns)) / math.sqrt(rows), rng.normal(size=columns) if bias else None
    )


def apply(layer, x):
    return x @ layer.weight if layer.bias is None else x @ layer.weight + layer.bias


def gelu(x):
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def normalized(norm, x, epsilon):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * norm.scale + norm.offset


def any_norm(rng, channels):
    return ac.parameters.LayerNorm(1 + rng.normal(size=channels) / 3, rng.normal(size=channels))


def transposed_for_scores(x, heads):
    """(batch, length, all) to (batch, head, length, each)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def bert_self_attention(rng):
    hidden_size, heads, batch, length = 12, 3, 2, 5
    tree = ac.parameters.MultiHeadAttention(*(dense(rng, hidden_size, hidden_size) for _ in range(3)))
    x = rng.normal(size=(batch, length, hidden_size))
    attention_mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    additive = (1.0 - attention_mask[:, None, None, :]) * -10000.0
    query, key, value = (transposed_for_scores(apply(each, x), heads) for each in tree[:3])
    weights = softmax(query @ key.transpose(0, 1, 3, 2) / math.sqrt(hidden_size / heads) + additive)
    context = (weights @ value).transpose(0, 2, 1, 3).reshape(batch, length, hidden_size)
    definition = layers.MultiHeadAttention(hidden_size, heads, output=False, dropout=0.1)
    yield Trial(definition, tree, (x,), context, {"key_mask": attention_mask == 1})
    yield Trial(definition, tree, (x,), context, {"bias": additive})


def dot_product_attention(rng):
    values = np.arange(40, dtype=np.float64).reshape(1, 10, 4)
    expected = np.broadcast_to(np.array([18.0, 19.0, 20.0, 21.0]), (1, 2, 4))
    definition = layers.DotProductAttention(dropout=0.5)
    yield Trial(definition, (), (rng.normal(size=(1, 2, 3)), np.ones((1, 10, 3)), values), expected)
    query, keys, values = (rng.normal(size=size) for size in ((2, 3, 5), (2, 7, 5), (2, 7, 4)))
    weights = softmax(query @ keys.transpose(0, 2, 1) / math.sqrt(5))
    yield Trial(definition, (), (query, keys, values), weights @ values)


def three_input_sizes(rng):
    query_size, key_size, value_size, num_hiddens, heads = 5, 7, 6, 12, 4
    tree = ac.parameters.MultiHeadAttention(
        dense(rng, query_size, num_hiddens, bias=False),
        dense(rng, key_size, num_hiddens, bias=False),
        dense(rng, value_size, num_hiddens, bias=False),
        dense(rng, num_hiddens, num_hiddens, bias=False),
    )
    inputs = tuple(rng.normal(size=size) for size in ((2, 3, query_size), (2, 8, key_size), (2, 8, value_size)))
    valid_lengths = np.array([3, 8])

    def folded(x):  # heads into the batch
        return transposed_for_scores(x, heads).reshape(2 * heads, x.shape[1], -1)

    query, key, value = (folded(apply(each, x)) for each, x in zip(tree[:3], inputs, strict=True))
    scores = query @ key.transpose(0, 2, 1) / math.sqrt(num_hiddens / heads)
    valid = np.arange(8) < np.repeat(valid_lengths, heads)[:, None, None]
    output = (softmax(np.where(valid, scores, -1e6)) @ value).reshape(2, heads, 3, -1)
    expected = apply(tree.output, output.transpose(0, 2, 1, 3).reshape(2, 3, num_hiddens))
    definition = layers.MultiHeadAttention(
        query_size,
        heads,
        key_channels=key_size,
        value_channels=value_size,
        head_dim=num_hiddens // heads,
        output_channels=num_hiddens,
        bias=False,
        dropout=0.1,
    )
    yield Trial(definition, tree, inputs, expected, {"key_mask": np.arange(8) < valid_lengths[:, None]})


def sagan(rng):
    channels, height, width = 16, 4, 6
    forms = (  # of g, output convolution, pooling, biases, spectral normalization
        ("a published tutorial", channels // 8, True, True, True, False),
        ("the code of the authors", channels // 2, True, True, False, True),
        ("a port to PyTorch", channels, False, False, True, False),
    )
    for _, value, output, pool, bias, norm in forms:
        tree = ac.parameters.SaganAttention(
            dense(rng, channels, channels // 8, bias),
            dense(rng, channels, channels // 8, bias),
            dense(rng, channels, value, bias),
            dense(rng, value, channels, bias) if output else None,
            np.asarray(0.7),
        )
        state = tuple(None if each is None else rng.normal(size=each.weight.shape[1]) for each in tree[:4])
        x = rng.normal(size=(2, height, width, channels))
        theta, phi, g, last = (
            each and each._replace(weight=over_spectral_norm(each.weight, u) if norm else each.weight)
            for each, u in zip(tree[:4], state, strict=True)
        )
        phi, g = (pooled(apply(each, x), pool) for each in (phi, g))
        weights = softmax(apply(theta, x).reshape(2, height * width, -1) @ phi.transpose(0, 2, 1))
        found = (weights @ g).reshape(2, height, width, -1)
        expected = x + 0.7 * (found if last is None else apply(last, found))
        for data_format in ("channels_last", "channels_first"):
            definition = layers.SaganAttention(
                channels,
                value_channels=value,
                output=output,
                bias=bias,
                pool=pool,
                spectral_norm=norm,
                data_format=data_format,
            )
            order = (0, 1, 2, 3) if data_format == "channels_last" else (0, 3, 1, 2)
            vectors = layers.SpectralVectors(*state) if norm else ()
            yield Trial(definition, tree, (x.transpose(order),), expected.transpose(order), state=vectors)


def over_spectral_norm(weight, u):
    """One step of power iteration, as in the code of the authors."""
    u = u[None, :]
    v = u @ weight.T
    v = v / (np.sqrt((v**2).sum()) + 1e-12)
    u = v @ weight
    u = u / (np.sqrt((u**2).sum()) + 1e-12)
    return weight / (v @ weight @ u.T)


def pooled(maps, pool):
    batch, height, width, channels = maps.shape
    if pool:
        maps = maps.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))
    return maps.reshape(batch, -1, channels)


def keras_style(rng):
    d_model, heads = 12, 2
    tree = ac.parameters.MultiHeadAttention(*(dense(rng, d_model, d_model) for _ in range(4)))
    inputs = {name: rng.normal(size=(3, length, d_model)) for name, length in (("query", 4), ("key", 6), ("value", 6))}
    query, key, value = (
        transposed_for_scores(apply(each, x), heads) for each, x in zip(tree[:3], inputs.values(), strict=True)
    )
    attention = softmax(query @ key.transpose(0, 1, 3, 2) / np.sqrt(d_model // heads)) @ value
    expected = apply(tree.output, attention.transpose(0, 2, 1, 3).reshape(3, 4, d_model))
    yield Trial(layers.MultiHeadAttention(d_model, heads), tree, (inputs,), expected)


def masked_dot_product(rng):
    query, key, value = (rng.normal(size=size) for size in ((2, 4, 3), (2, 5, 3), (2, 5, 6)))
    query_mask = np.array([[True, True, False, False], [True] * 4])
    key_mask = np.array([[True, True, True, True, False], [False] * 5])
    pairs = rng.random((2, 4, 5)) < 0.6
    scores = query @ key.transpose(0, 2, 1) / math.sqrt(3)
    both = query_mask[:, :, None] & key_mask[:, None, :]
    for mask, options in (
        (both, {"query_mask": query_mask, "key_mask": key_mask}),
        (np.broadcast_to(key_mask[:, None, :], both.shape), {"key_mask": key_mask}),
        (pairs, {"mask": pairs}),
        (pairs & both, {"mask": pairs, "query_mask": query_mask, "key_mask": key_mask}),
    ):
        weights = np.nan_to_num(softmax(np.where(mask, scores, -np.inf)), nan=0.0)
        yield Trial(layers.DotProductAttention(), (), (query, key, value), weights @ value, options)


def heads_apart(rng):
    embed, heads, head = 10, 3, 4
    apart = [tuple(dense(rng, embed, head) for _ in range(3)) for _ in range(heads)]
    output = dense(rng, heads * head, embed)
    x = rng.normal(size=(2, 5, embed))

    def one(triple):
        query, key, value = (apply(each, x) for each in triple)
        return softmax(query @ key.transpose(0, 2, 1) / math.sqrt(head)) @ value

    expected = apply(output, np.concatenate([one(triple) for triple in apart], -1))
    yield Trial(layers.MultiHeadAttention(embed, heads, head_dim=head), join_heads(apart, output), (x,), expected)


def feed_forward(rng):
    tree = ac.parameters.FeedForward(dense(rng, 6, 24), dense(rng, 24, 6))
    x = rng.normal(size=(2, 5, 6))
    expected = apply(tree.contract, gelu(apply(tree.expand, x)))
    yield Trial(layers.FeedForward(6, 24, dropout=0.1), tree, (x,), expected)


def encoder_layer(rng):
    channels, heads, inner = 12, 3, 20
    tree = ac.parameters.EncoderLayer(
        ac.parameters.MultiHeadAttention(*(dense(rng, channels, channels) for _ in range(4))),
        any_norm(rng, channels),
        ac.parameters.FeedForward(dense(rng, channels, inner), dense(rng, inner, channels)),
        any_norm(rng, channels),
    )
    x, mask = rng.normal(size=(2, 5, channels)), np.array([[True] * 5, [True] * 3 + [False] * 2])

    def attend(h):
        query, key, value = (transposed_for_scores(apply(each, h), heads) for each in tree.attention[:3])
        scores = query @ key.transpose(0, 1, 3, 2) / math.sqrt(channels / heads)
        found = softmax(np.where(mask[:, None, None, :], scores, -np.inf)) @ value
        return apply(tree.attention.output, found.transpose(0, 2, 1, 3).reshape(h.shape))

    def feed(h):
        return apply(tree.feed_forward.contract, gelu(apply(tree.feed_forward.expand, h)))

    norms = [
        functools.partial(normalized, each, epsilon=1e-5) for each in (tree.attention_norm, tree.feed_forward_norm)
    ]
    first = x + attend(norms[0](x))
    first = first + feed(norms[1](first))
    last = norms[0](x + attend(x))
    last = norms[1](last + feed(last))
    for norm_first, expected in ((True, first), (False, last)):
        definition = layers.EncoderLayer(channels, heads, inner, norm_first=norm_first, dropout=0.1)
        yield Trial(definition, tree, (x,), expected, {"key_mask": mask})


def embeddings(rng):
    channels, ids, segments = 8, np.array([[1, 5, 2], [0, 10, 3]]), np.array([[0, 1, 1], [0, 0, 1]])
    for with_segments in (False, True):
        token, position, segment = (rng.normal(size=(entries, channels)) for entries in (11, 7, 2))
        tree = ac.parameters.Embeddings(token, position, segment if with_segments else None, any_norm(rng, channels))
        total = token[ids] + position[np.arange(3)] + (segment[segments] if with_segments else 0)
        definition = layers.Embeddings(11, 7, channels, num_segments=2 if with_segments else None, dropout=0.1)
        options = {"segment_ids": segments} if with_segments else {}
        yield Trial(definition, tree, (ids,), normalized(tree.norm, total, 1e-12), options)


def own_widths(rng):
    dim_in, dim_k, dim_v, heads = 7, 6, 9, 3
    tree = ac.parameters.MultiHeadAttention(*(dense(rng, dim_in, width, bias=False) for width in (dim_k, dim_k, dim_v)))
    x = rng.normal(size=(2, 5, dim_in))
    query, key, value = (transposed_for_scores(apply(each, x), heads) for each in tree[:3])
    found = softmax(query @ key.transpose(0, 1, 3, 2) / math.sqrt(dim_k // heads)) @ value
    definition = layers.MultiHeadAttention(
        dim_in, heads, head_dim=dim_k // heads, value_head_dim=dim_v // heads, bias=False, output=False
    )
    yield Trial(definition, tree, (x,), found.transpose(0, 2, 1, 3).reshape(2, 5, dim_v))


SYSTEMS: dict[str, Callable[[Any], Any]] = {
    "BERT self-attention": bert_self_attention,
    "Dot-product attention": dot_product_attention,
    "Multi-head attention with three input sizes": three_input_sizes,
    "SAGAN self-attention over feature maps": sagan,
    "Keras-style multi-head attention": keras_style,
    "Scaled dot-product attention with query and key masks": masked_dot_product,
    "Attention heads kept apart": heads_apart,
    "Feed-forward": feed_forward,
    "Encoder layer, norm first and last": encoder_layer,
    "Embeddings": embeddings,
    "Self-attention with widths of its own": own_widths,
}


def called(trial, backend):
    """What a layer gives: that of the adapter, or of the core where the library has no layers."""
    put = backend.from_numpy
    if backend.name not in LAYERS:
        options = {**put(trial.options), **({"state": put(trial.state)} if trial.state else {})}
        return backend.to_numpy(trial.definition(put(trial.parameters), *put(trial.inputs), **options))
    adapter = importlib.import_module(LAYERS[backend.name])
    kind = getattr(adapter, type(trial.definition).__name__)
    dtype = {"dtype": "float64"} if backend.name == "tensorflow" else {}  # to which Keras converts the inputs
    layer = kind.from_numpy(trial.definition, trial.parameters, trial.state, **dtype)
    if backend.name == "torch":
        layer.eval()
    return backend.to_numpy(layer(*put(trial.inputs), **put(trial.options)))


def error(system, backend):
    """The largest error of a system on a backend, absolute, where results are about as large as 1."""
    worst = 0.0
    for trial in SYSTEMS[system](np.random.default_rng(20240229)):
        found = np.asarray(called(trial, backend))
        assert found.dtype == np.float64, f"{system} on {backend.name} gives {found.dtype}"
        assert found.shape == trial.expected.shape, f"{system} on {backend.name} gives {found.shape}"
        worst = max(worst, float(np.max(np.abs(found - trial.expected))))
    return worst


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_is_expressed_by_settings(system, backend):
    """In float64, with the same weights, to 1e-12."""
    assert error(system, backend) <= BOUND


def test_equal_keys_give_the_mean_exactly(backend):
    assert error("Dot-product attention", backend) < 1e-14
    values = np.arange(40, dtype=np.float32).reshape(1, 10, 4)
    put, get = backend.from_numpy, backend.to_numpy
    query, keys = np.ones((1, 2, 2), dtype=np.float32), np.ones((1, 10, 2), dtype=np.float32)
    found = get(layers.DotProductAttention()((), *put((query, keys, values))))
    np.testing.assert_array_equal(found, np.broadcast_to(np.float32([18, 19, 20, 21]), (1, 2, 4)))


def main():
    """Print the table of the documentation, or fail where a system is beyond the bound."""
    print(f"| system | {' | '.join(LAYERS)} |\n|---|{'---|' * len(LAYERS)}")
    for system in SYSTEMS:
        errors = [error(system, get_backend(name)) for name in LAYERS]
        assert max(errors) <= BOUND, f"{system}: {errors}"
        print(f"| {system} | {' | '.join(f'{each:.1e}' if each else 'exact' for each in errors)} |")


if __name__ == "__main__":
    main()
