"""Multi-head attention and the encoder layer, each against its formula head by head."""

import functools
import math

import numpy as np
import pytest
from backend_helpers import close as near
from blockwise_helpers import quickly

import attention_core as ac
from attention_core.parameters import EncoderLayer, FeedForward, LayerNorm, Linear, MultiHeadAttention

close = functools.partial(near, ulps=64)

C, H, G, D, E, M, N = 10, 4, 2, 3, 5, 6, 7


def affine(rng, *shape, bias=True):
    return Linear(rng.standard_normal(shape) / math.sqrt(shape[0]), rng.standard_normal(shape[1]) if bias else None)


def repeated(p, count):
    """Projections with a copy of each key/value head for the query heads that share it."""

    def columns(array):
        heads = array.reshape(*array.shape[:-1], -1, C // 5)
        return np.repeat(heads, count, axis=-2).reshape(*array.shape[:-1], -1)

    key, value = (Linear(*map(columns, each)) for each in (p.key, p.value))
    return p._replace(key=key, value=value)


@pytest.fixture
def parameters(rng):
    return MultiHeadAttention(
        affine(rng, C, H * D), affine(rng, 8, G * D), affine(rng, 9, G * E), affine(rng, H * E, C)
    )


@pytest.fixture
def inputs(rng):
    return rng.standard_normal((2, M, C)), rng.standard_normal((2, N, 8)), rng.standard_normal((2, N, 9))


def test_options_of_attention_are_passed_on(parameters, inputs, rng, put, get):
    heads = {"num_heads": H, "num_key_value_heads": G}
    bias = rng.standard_normal((H, M, N))
    q, k, v = (
        ac.split_heads(ac.functions.linear(p, x), n)
        for p, x, n in zip(put(parameters)[:3], put(inputs), (H, G, G), strict=True)
    )
    options = {"bias": put(bias), "scale": 0.3, "softcap": 2.0, "dropout": ac.Dropout(0.2, 9)}
    options |= {"mask": put(rng.random((2, 1, M, N)) < 0.7), "is_causal": True}
    expected = ac.functions.linear(
        put(parameters.output), ac.merge_heads(ac.scaled_dot_product_attention(q, k, v, **options))
    )
    got = ac.multi_head_attention(put(parameters), *put(inputs), **heads, **options, return_logsumexp=True)
    np.testing.assert_array_equal(get(got.output), get(expected))
    assert got.weights is None


def encoder(rng):
    attention = MultiHeadAttention(*(affine(rng, C, C) for _ in range(4)))
    norms = [LayerNorm(rng.standard_normal(C), rng.standard_normal(C)) for _ in range(2)]
    return EncoderLayer(attention, norms[0], FeedForward(affine(rng, C, 13), affine(rng, 13, C)), norms[1])


def test_encoder_layer_adds_a_bias_and_applies_a_function_to_scores(rng, put, get, xp):
    p, x = put((encoder(rng), rng.standard_normal((2, M, C))))
    near = np.arange(M)[None, :] - np.arange(M)[:, None]

    def further(scores, batch, head, query, key):
        return scores + xp.astype(key - query, scores.dtype)

    biased = ac.functions.encoder_layer(p, x, num_heads=5, bias=put(near.astype(float)))
    changed = ac.functions.encoder_layer(p, x, num_heads=5, score_mod=further)
    close(get(changed), get(biased), ulps=256)
    assert np.abs(get(biased) - get(ac.functions.encoder_layer(p, x, num_heads=5))).max() > 0.01
    allowed = put(np.where(near <= 0, 0.0, -np.inf))
    close(
        get(ac.functions.encoder_layer(p, x, num_heads=5, bias=allowed)),
        get(ac.functions.encoder_layer(p, x, num_heads=5, is_causal=True)),
    )
    with pytest.raises(ValueError):
        ac.functions.encoder_layer(p, x, num_heads=5, bias=put(np.zeros((4, M, M))))


@pytest.mark.parametrize("arithmetic", ["fast", "reproducible"])
def test_encoder_layer_is_causal_with_grouped_heads_weights_and_an_activation(arithmetic, rng, put, get):
    """As with repeated heads, a causal mask and another map in between."""
    p, x = encoder(rng), rng.standard_normal((2, M, C)).astype("float32")
    grouped = p.attention._replace(key=affine(rng, C, 2), value=affine(rng, C, 2))
    grouped, p = put((p._replace(attention=grouped), p._replace(attention=repeated(grouped, 5))), dtype="float32")
    causal, common = put(np.tri(M, dtype=bool)), {"num_heads": 5, "arithmetic": arithmetic}
    result = ac.functions.encoder_layer(
        grouped, put(x), num_key_value_heads=1, is_causal=True, activation="relu", return_weights=True, **common
    )
    seen = []

    def hook(name, function, h):
        seen.append(name)
        return function(h)

    expected = ac.functions.encoder_layer(p, put(x), mask=causal, activation="relu", hook=hook, **common)
    close(get(result.output), get(expected), ulps=256)
    assert seen == ["attention_norm", "attention", "feed_forward_norm", "feed_forward"]
    assert get(result.weights).shape == (2, 5, M, M)
    assert not get(result.weights)[..., ~np.tri(M, dtype=bool)].any()
    assert (
        np.abs(get(ac.functions.encoder_layer(p, put(x), mask=causal, **common)) - get(expected)).max() > 0.01
    )  # the GELU


def test_encoder_dropout_has_a_seed_of_its_own_for_every_place(backend, put, get):
    """With attention and feed-forward giving constants, what is kept on one branch is not what is kept on the other."""
    zero = Linear(np.zeros((C, C)))
    ones = Linear(np.zeros((C, C)), np.ones(C))
    quiet = LayerNorm(np.zeros(C), np.zeros(C))
    p = EncoderLayer(MultiHeadAttention(zero, zero, zero, ones), quiet, FeedForward(zero, ones), quiet)
    arrays = put((p, np.zeros((3, M, C))))
    run = quickly(
        backend, lambda p, x, seed: ac.functions.encoder_layer(p, x, num_heads=5, dropout=ac.Dropout(0.5, seed))
    )
    both, again, other = (get(run(*arrays, put(np.asarray(seed)))) for seed in (4, 4, 5))
    assert {0.0, 2.0, 4.0} == set(np.unique(both))
    np.testing.assert_array_equal(both, again)
    assert (other != both).any()
