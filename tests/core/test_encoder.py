"""Multi-head attention and the encoder layer, each against its formula head by head."""

import math

import numpy as np
import pytest
from blockwise_helpers import quickly

import attention_core as ac
from attention_core.parameters import EncoderLayer, FeedForward, LayerNorm, Linear, MultiHeadAttention

C, H, G, D, E, M, N = 10, 4, 2, 3, 5, 6, 7


def close(got, expected, ulps=64):
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(got, expected, rtol=0, atol=ulps * scale * np.finfo(got.dtype).eps)


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def affine(rng, *shape, bias=True):
    return Linear(rng.standard_normal(shape) / math.sqrt(shape[0]), rng.standard_normal(shape[1]) if bias else None)


def repeated(p, count):
    """Projections with a copy of each key/value head for the query heads that share it."""

    def columns(array):
        heads = array.reshape(*array.shape[:-1], -1, C // 5)
        return np.repeat(heads, count, axis=-2).reshape(*array.shape[:-1], -1)

    key, value = (Linear(*map(columns, each)) for each in (p.key, p.value))
    return p._replace(key=key, value=value)


def apply(p, x):
    return x @ p.weight + (0 if p.bias is None else p.bias)


def by_heads(p, query, key, value, heads, groups, allowed=None):
    """Each head apart, by slices of the projections."""
    q, k, v = apply(p.query, query), apply(p.key, key), apply(p.value, value)
    outputs, weights = [], []
    for h in range(heads):
        of_head, shared = [
            slice(n * width, (n + 1) * width)
            for n, width in ((h, q.shape[-1] // heads), (h // (heads // groups), k.shape[-1] // groups))
        ]
        values = slice(
            h // (heads // groups) * (v.shape[-1] // groups), (h // (heads // groups) + 1) * (v.shape[-1] // groups)
        )
        s = q[..., of_head] @ np.swapaxes(k[..., shared], -1, -2) / math.sqrt(q.shape[-1] // heads)
        weights.append(softmax(s if allowed is None else np.where(allowed, s, -np.inf)))
        outputs.append(weights[-1] @ v[..., values])
    merged = np.concatenate(outputs, -1)
    return (merged if p.output is None else apply(p.output, merged)), np.stack(weights, -3)


@pytest.fixture
def parameters(rng):
    return MultiHeadAttention(
        affine(rng, C, H * D), affine(rng, 8, G * D), affine(rng, 9, G * E), affine(rng, H * E, C)
    )


@pytest.fixture
def inputs(rng):
    return rng.standard_normal((2, M, C)), rng.standard_normal((2, N, 8)), rng.standard_normal((2, N, 9))


def test_multi_head_attention_is_attention_of_each_head(parameters, inputs, put, get):
    expected, weights = by_heads(parameters, *inputs, H, G)
    result = ac.multi_head_attention(
        put(parameters), *put(inputs), num_heads=H, num_key_value_heads=G, return_weights=True
    )
    close(get(result.output), expected)
    close(get(result.weights), weights)
    assert result.logsumexp is None


def test_options_of_attention_are_passed_on(parameters, inputs, rng, put, get):
    allowed = rng.random((2, 1, M, N)) < 0.7
    allowed[..., 0] = True
    expected, _ = by_heads(parameters, *inputs, H, G, allowed[:, 0] & np.tri(M, N, dtype=bool))
    heads = {"num_heads": H, "num_key_value_heads": G}
    result = ac.multi_head_attention(put(parameters), *put(inputs), **heads, mask=put(allowed), is_causal=True)
    close(get(result), expected)
    bias = rng.standard_normal((H, M, N))
    q, k, v = (
        ac.split_heads(ac.functions.linear(p, x), n)
        for p, x, n in zip(put(parameters)[:3], put(inputs), (H, G, G), strict=True)
    )
    options = {"bias": put(bias), "scale": 0.3, "softcap": 2.0, "dropout": ac.Dropout(0.2, 9)}
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


def normalized(p, x, epsilon):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + epsilon) * p.scale + p.offset


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layer_is_its_formula(rng, put, get, norm_first):
    p, x = encoder(rng), rng.standard_normal((2, M, C))
    lengths, epsilon = np.array([M, 4]), 1e-3
    allowed = np.arange(M)[None, None, :] < lengths[:, None, None]
    gauss = np.vectorize(lambda t: 0.5 * t * math.erfc(-t / math.sqrt(2)))

    def attend(h):
        return by_heads(p.attention, h, h, h, 5, 5, allowed)[0]

    def feed(h):
        return apply(p.feed_forward.contract, gauss(apply(p.feed_forward.expand, h)))

    if norm_first:
        h = x + attend(normalized(p.attention_norm, x, epsilon))
        expected = h + feed(normalized(p.feed_forward_norm, h, epsilon))
    else:
        h = normalized(p.attention_norm, x + attend(x), epsilon)
        expected = normalized(p.feed_forward_norm, h + feed(h), epsilon)
    options = {"num_heads": 5, "norm_first": norm_first, "epsilon": epsilon, "mask": ac.KeyLengths(put(lengths))}
    close(get(ac.functions.encoder_layer(put(p), put(x), **options)), expected, ulps=512)


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
    with pytest.raises(ValueError, match=r"^expected bias to broadcast to \(2, 5, 6, 6\); got \(4, 6, 6\)"):
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


def test_wrong_inputs_and_heads_are_named(parameters, inputs, rng, put):
    heads = {"num_heads": H, "num_key_value_heads": G}
    p, (q, k, v) = put(parameters), put(inputs)
    e, x = encoder(rng), put(rng.standard_normal((2, M, C)))
    for call, error, message in (
        (lambda: ac.multi_head_attention(p, q, k, v, num_heads=5), ValueError, "expected query projection to channels that 5 heads share out evenly; got 12"),
        (lambda: ac.multi_head_attention(p, q, k, v, num_heads=H, num_key_value_heads=3), ValueError, "expected num_key_value_heads that divide num_heads 4; got 3"),
        (lambda: ac.multi_head_attention(p, q, k, v, num_heads=2.0), TypeError, "expected num_heads as a positive integer; got float"),
        (lambda: ac.multi_head_attention(p, q, k, v, num_heads=2, num_key_value_heads=2), ValueError, "expected key heads of width 6 to match query heads; got 3"),
        (lambda: ac.multi_head_attention(p, put(inputs[0][:1]), k, v, **heads), ValueError, r"expected key \(1, N, K\) to match query \(1, 6, 10\); got \(2, 7, 8\)"),
        (lambda: ac.multi_head_attention(put(parameters._replace(output=Linear(np.ones((19, C))))), q, k, v, **heads), ValueError, r"expected output projection.weight \(20, out\)"),
        (lambda: ac.multi_head_attention(put(parameters._replace(output=Linear(np.ones((20, C)), np.ones(3)))), q, k, v, **heads), ValueError, r"expected output projection.bias \(10,\)"),
        (lambda: ac.multi_head_attention(None, q, k, v, **heads), TypeError, r"expected attention as MultiHeadAttention\(query, key, value, output\); got NoneType"),
        (lambda: ac.multi_head_attention(MultiHeadAttention(q, q, q), q, **heads), TypeError, r"expected attention.query as Linear\(weight, bias\); got"),
        (lambda: ac.functions.encoder_layer(put(e)._replace(attention_norm=None), x, num_heads=2), TypeError, r"expected attention_norm as LayerNorm\(scale, offset\); got NoneType"),
        (lambda: ac.functions.encoder_layer(put(e), x, num_heads=3), ValueError, "share out evenly; got 10"),
        (lambda: ac.functions.encoder_layer(put(e), x, num_heads=2, mask=put(np.ones((N, N), dtype=bool))), ValueError, "expected mask to broadcast"),
        (lambda: ac.functions.encoder_layer(put(e._replace(attention_norm=LayerNorm(np.ones(3), np.ones(C)))), x, num_heads=2), ValueError, r"expected attention_norm.scale \(10,\)"),
        (lambda: ac.functions.encoder_layer(put(e._replace(feed_forward=FeedForward(Linear(np.ones((C, 3))), Linear(np.ones((3, 4)))))), x, num_heads=2), ValueError, "expected feed_forward.contract back to 10 channels; got 4"),
        (lambda: ac.functions.encoder_layer(put(e), x, num_heads=2, hook=lambda name, function, h: h, return_weights=True), TypeError, r"expected the result of hook for attention as Attention\(output, weights, logsumexp\); got"),
        (lambda: ac.functions.encoder_layer(put(e), x, num_heads=2, hook=lambda name, function, h: None), TypeError, "expected the result of hook for attention_norm as an array; got NoneType"),
        (lambda: ac.functions.encoder_layer(put(e), x, num_heads=2, hook=lambda name, function, h: function(h)[..., :2]), ValueError, r"expected the result of hook for attention_norm \(2, 6, 10\), as its input; got \(2, 6, 2\)"),
        (lambda: ac.functions.encoder_layer(put(e), x, num_heads=2, epsilon=-1.0), ValueError, "expected epsilon as a positive finite number; got -1.0"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
