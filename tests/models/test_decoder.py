"""The decoder layer and the decoder of a language model, against their formula and against themselves in pieces."""

import math

import numpy as np
import pytest
from blockwise_helpers import quickly

import attention_core as ac
import attention_models as models
from attention_core import layers
from attention_core._arithmetic.exact import round_to_half

C, H, G, D, INNER, V, N = 10, 6, 2, 4, 13, 30, 2
ALL = {
    "num_key_value_heads": G, "head_dim": D, "attention_bias": True, "output_bias": False, "query_key_norm": True,
    "post_norm": True, "activation": "gelu_tanh", "epsilon": 1e-5, "rotary_base": 500.0, "window": (3, None),
    "rotary_divisors": (4.0, 1.25), "scale": 0.3, "softcap": 4.0, "tied": False, "embedding_scale": 1.5, "logit_softcap": 5.0,
}  # fmt: skip
FIRST = {
    "head_dim": D, "num_key_value_heads": G, "norm": "layer", "norm_first": False, "gated": False, "activation": "relu",
    "attention_bias": True, "feed_forward_bias": True, "rotary_base": None, "epsilon": 1e-5,
}  # fmt: skip
"""The decoder of the first transformer, but for its grouped heads."""


def filled(definition, rng, dtype="float32"):
    """Parameters of a definition, in which no bias is 0 and no scale is 1."""
    like = definition.init(0, xp=np)
    named = layers.named_arrays(like)
    drawn = {name: (rng.standard_normal(a.shape) / math.sqrt(a.shape[0])) for name, a in named.items()}
    drawn = {name: 1 + a / 3 if a.ndim == 1 else a for name, a in drawn.items()}
    return layers.tree_from_names(like, {name: a.astype(dtype) for name, a in drawn.items()})


def apply(p, x):
    return x @ p.weight + (0 if p.bias is None else p.bias)


def rms(scale, x, epsilon):
    """Or, of two arrays, with the mean taken off and an offset."""
    if isinstance(scale, tuple):
        return rms(scale.scale, x - x.mean(-1, keepdims=True), epsilon) + scale.offset
    return x if scale is None else x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def turned(x, positions, d):
    half = x.shape[-1] // 2
    angle = positions[..., None] * d.rotary_base ** (-np.arange(half) / half) / (d.rotary_divisors or 1)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def attention(p, q_input, kv_input, allowed, *, scale=None, softcap=None, prepare=lambda q, k: (q, k)):
    """(L, C), (M, C') -> (L, C): every head apart."""
    outputs = []
    q, k, v = apply(p.query, q_input), apply(p.key, kv_input), apply(p.value, kv_input)
    for h in range(H):
        g = h // (H // G)
        qh, kh = prepare(q[:, h * D : (h + 1) * D], k[:, g * D : (g + 1) * D])
        s = qh @ kh.T * (1 / math.sqrt(D) if scale is None else scale)
        s = np.where(allowed, s if softcap is None else softcap * np.tanh(s / softcap), -np.inf)
        e = np.exp(s - s.max(-1, keepdims=True))
        outputs.append(e / e.sum(-1, keepdims=True) @ v[:, g * D : (g + 1) * D])
    return apply(p.output, np.concatenate(outputs, -1))


ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def formula(p, x, d, window, memory=None):
    """One sequence through a layer: (L, C) -> (L, C)."""
    index = np.arange(len(x))
    allowed = index <= index[:, None]
    allowed = allowed if window is None else allowed & (index > index[:, None] - window)

    def prepare(q, k):
        q, k = rms(p.query_norm, q, d.epsilon), rms(p.key_norm, k, d.epsilon)
        return (q, k) if d.rotary_base is None else (turned(q, index, d), turned(k, index, d))

    def feed(h):
        inner = ACTIVATIONS[d.activation](apply(p.feed_forward[0], h))  # of the gate, if there is one
        return apply(p.feed_forward.contract, inner * apply(p.feed_forward.expand, h) if d.gated else inner)

    def residual(x, norm, post_norm, branch):
        if d.norm_first:
            return x + rms(post_norm, branch(rms(norm, x, d.epsilon)), d.epsilon)
        return rms(norm, x + rms(post_norm, branch(x), d.epsilon), d.epsilon)

    options = {"scale": d.scale, "softcap": d.softcap, "prepare": prepare}
    x = residual(x, p.attention_norm, p.attention_post_norm, lambda h: attention(p.attention, h, h, allowed, **options))
    if memory is not None:
        x = residual(x, p.cross_attention_norm, None, lambda h: attention(p.cross_attention, h, memory, np.True_))
    return residual(x, p.feed_forward_norm, p.feed_forward_post_norm, feed)


def logits(p, ids, d, memory=None):
    x = p.token[ids] * (d.embedding_scale or 1)
    for layer, window in zip(p.layers, d.windows, strict=True):
        x = formula(layer, x, d, window, memory)
    x = rms(p.norm, x, d.epsilon) @ (p.token.T if d.tied else p.output.weight)
    return x if d.logit_softcap is None else d.logit_softcap * np.tanh(x / d.logit_softcap)


LLAMA = {"num_key_value_heads": G, "head_dim": D}
COMPILED_LONG = pytest.param(
    "reproducible", marks=pytest.mark.needs("untraced loops")
)  # elsewhere, by published hashes


@pytest.mark.parametrize("arithmetic", ["fast", "reproducible"])
@pytest.mark.parametrize("settings", [LLAMA, ALL, FIRST], ids=["llama", "all", "first"])
def test_a_decoder_is_its_formula(settings, arithmetic, backend, rng, put, get):
    d = models.Decoder(V, C, H, INNER, N, **settings, arithmetic=arithmetic)
    p, ids = filled(d, rng), rng.integers(0, V, (3, 7))
    expected = np.stack([logits(_wide(p), each, d) for each in ids])
    found = get(quickly(backend, d)(put(p), put(ids)))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    if arithmetic == "fast":
        found = get(quickly(backend, d)(put(_wide(p)), put(ids)))
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-14 * np.abs(expected).max())


def _wide(tree):
    if not isinstance(tree, tuple):
        return None if tree is None else np.asarray(tree, np.float64)
    branches = [_wide(branch) for branch in tree]
    return type(tree)(*branches) if hasattr(tree, "_fields") else tuple(branches)


@pytest.mark.parametrize(
    ("settings", "arithmetic"),
    [(ALL, "fast"), pytest.param(ALL, "reproducible", marks=COMPILED_LONG.marks), (FIRST, "fast")],
)
def test_a_decoder_attends_to_the_memory_of_an_encoder(settings, arithmetic, backend, rng, put, get):
    """With all options of its own attention."""
    d = models.Decoder(V, C, H, INNER, N, memory_channels=5, **settings, arithmetic=arithmetic)
    p, ids, memory = filled(d, rng), rng.integers(0, V, (2, 4)), rng.standard_normal((2, 6, 5)).astype("float32")
    wide = [logits(_wide(p), *each[:1], d, np.float64(each[1])) for each in zip(ids, memory, strict=True)]
    expected, padded = np.stack(wide), np.concatenate([memory, np.full((2, 2, 5), np.nan, "float32")], -2)

    def run(p, memory, **masks):
        return get(quickly(backend, lambda p, memory: d(p, put(ids), memory=memory, **masks))(put(p), put(memory)))

    keys = put(np.arange(8) < np.full((2, 1), 6))
    for each, masks in ((memory, {}), (padded, {"memory_mask": ac.KeyLengths(6)}), (padded, {"memory_key_mask": keys})):
        found = run(p, each, **masks)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    if arithmetic == "fast":
        found = run(_wide(p), np.float64(memory))
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-14 * np.abs(expected).max())


@pytest.mark.parametrize("arithmetic", ["fast", COMPILED_LONG])
def test_a_fully_masked_position_keeps_its_residual_branch(arithmetic, rng, put, get):
    """Attention adds 0 there, and NaN at positions that are masked reaches no other."""
    d = layers.DecoderLayer(C, H, INNER, **LLAMA, arithmetic=arithmetic)
    p, x = filled(d, rng), rng.standard_normal((2, 5, C)).astype("float32")
    x[0, 3:], x[1, 0] = np.nan, np.nan
    allowed = np.ones((2, 1, 5, 5), bool)
    allowed[0, ..., 3:], allowed[1, ..., 0], allowed[1, :, 2] = False, False, False
    found = get(d(put(p), put(x), mask=put(allowed)))
    for row, kept in ((0, slice(3)), (1, slice(1, 5))):
        assert np.isfinite(found[row, kept]).all()
    h = np.float64(x[1, 2])
    normal = rms(_wide(p).feed_forward_norm, h, d.epsilon)
    w = _wide(p).feed_forward
    fed = apply(w.contract, ACTIVATIONS["silu"](apply(w.gate, normal)) * apply(w.expand, normal))
    np.testing.assert_allclose(found[1, 2], h + fed, rtol=0, atol=2e-5)
    alone = get(d(put(p), put(x[:1, :3])))
    np.testing.assert_allclose(found[0, :3], alone[0], rtol=0, atol=0 if arithmetic == "reproducible" else 2e-5)


def close_by_arithmetic(arithmetic):
    """In reproducible arithmetic to the bit."""
    tolerance = 0 if arithmetic == "reproducible" else 2e-5
    return lambda found, expected: np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.needs("untraced loops")  # elsewhere, every shape is compiled
@pytest.mark.parametrize("arithmetic", ["fast", "reproducible"])
def test_a_cache_in_chunks_and_a_batch_do_not_show(arithmetic, rng, xp, put, get):
    d = models.Decoder(V, C, H, INNER, N, **ALL, arithmetic=arithmetic)
    p, ids = put(filled(d, rng)), rng.integers(0, V, (3, 7)).astype(np.int32)
    whole, same = get(d(p, put(ids))), close_by_arithmetic(arithmetic)
    same(get(d(p, put(ids[1]))), whole[1])
    cache, parts = d.empty_cache((3,), 9, xp=xp), []
    for first, last in ((0, 4), (4, 5), (5, 7)):
        part, cache = d(p, put(ids[:, first:last]), cache=cache)
        parts.append(get(part))
    same(np.concatenate(parts, 1), whole)
    assert int(cache.length) == 7


@pytest.mark.parametrize("arithmetic", ["fast", COMPILED_LONG])
def test_padding_on_either_side_does_not_show(arithmetic, backend, rng, xp, put, get):
    """With a cache of what was never written, and without one."""
    d = models.Decoder(V, C, H, INNER, N, **ALL, arithmetic=arithmetic)
    p, ids = put(filled(d, rng)), rng.integers(0, V, (3, 7)).astype(np.int32)

    def run(ids, **options):
        return quickly(backend, lambda p, ids, options: d(p, ids, **options))(p, put(ids), options)

    whole, same = get(run(ids)), close_by_arithmetic(arithmetic)
    lengths = np.asarray([7, 3, 5], np.int32)
    cache = d.empty_cache((3,), 7, ragged=True, xp=xp)
    unwritten = tuple(put(np.full(k.shape, np.nan, np.float32)) for k in cache.key)
    cache = cache._replace(key=unwritten, value=unwritten)
    found, cache = run(ids, cache=cache, num_new=put(lengths), select=put(lengths[:, None] - 1))
    for row, length in enumerate(lengths):
        same(get(found)[row, 0], whole[row, length - 1])
    np.testing.assert_array_equal(get(cache.length), lengths)

    found = get(run(ids, num_new=put(lengths)))
    same(found[2, :5], whole[2, :5])
    left = np.stack([np.roll(row, 7 - n) for row, n in zip(ids, lengths, strict=True)])
    shift = 7 - lengths[:, None]
    places, key_mask = put(np.arange(7, dtype=np.int32) - shift), put(np.arange(7) >= shift)
    found = get(run(left, key_mask=key_mask, position_ids=places))
    for row, length in enumerate(lengths):
        same(found[row, 7 - int(length) :], whole[row, :length])


@pytest.mark.needs("dtype")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_decoders_are_computed_in_float32_and_round_keys_values_and_logits_alone(dtype, rng, xp, put, get):
    d = models.Decoder(V, C, H, INNER, N, **LLAMA, arithmetic="reproducible")
    p, ids = put(filled(d, rng), dtype=dtype), put(rng.integers(0, V, (2, 5)))
    wide = layers.tree_from_names(p, {k: xp.astype(a, xp.float32) for k, a in layers.named_arrays(p).items()})
    found = d(p, ids)
    for tree, kind in ((wide, p.token.dtype), (p, p.token.dtype), (p, xp.float32)):
        logits, cache = d(tree, ids, cache=d.empty_cache((2,), 6, dtype=kind, xp=xp))
        assert cache.key[0].dtype == kind
        logits = xp.astype(logits, found.dtype)
        np.testing.assert_array_equal(get(xp.astype(logits, xp.float32)), get(xp.astype(found, xp.float32)))


@pytest.mark.needs("dtype")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_is_rounded_to_16_bits_in_every_mode_and_keeps_its_gradient(dtype, backend, rng, xp, put, get):
    """A pair of conversions alone is left out by compilers that may compute in more bits than are asked for.

    A private function, as no decoder gives a number to round: its keys and values are those of projections.
    """
    kind = put(np.zeros(1, np.float32), dtype=dtype).dtype
    usual = rng.standard_normal(500) * 2.0 ** rng.integers(-30, 12, 500)
    x = np.asarray(
        [*usual, 0, -0.0, 65519, 65520, -7e4, 1e35, 2.0**-24, 1.01 * 2.0**-14, np.inf, -np.inf, np.nan], "f4"
    )
    with np.errstate(all="ignore"):
        expected = get(xp.astype(xp.astype(put(x), kind), xp.float32))
    is_normal = np.isfinite(x) & (np.abs(x) >= 2.0**-14) & (np.abs(x) < 6e4)
    for mode in backend.modes:
        with np.errstate(all="ignore"):
            found = get(backend.compile(lambda x: round_to_half(x, dtype=kind, xp=xp), mode=mode)(put(x)))
        is_compared = is_normal | (mode == "eager")
        np.testing.assert_array_equal(found[is_compared], expected[is_compared])
    if backend.differentiates:
        numbers, factor = put(x[is_normal]), put(x[is_normal] + 1)
        _, (gradient,) = backend.value_and_grad(
            lambda x: xp.sum(xp.multiply(round_to_half(x, dtype=kind, xp=xp), factor))
        )(numbers)
        np.testing.assert_array_equal(get(gradient), get(factor))


@pytest.mark.needs("torch")  # elsewhere, the operations have their gradients' tests, and compiling takes minutes
def test_gradients_of_both_arithmetics_agree(backend):
    """Those of the fast one are compared with other models in `tests/peers`."""
    xp, found = backend.namespace, []
    for arithmetic in ("fast", "reproducible"):
        d = models.Decoder(V, C, H, INNER, N, **{**ALL, "tied": True}, arithmetic=arithmetic)
        p, ids = filled(d, np.random.default_rng(5)), np.asarray([[0, 1, 2, 3, 1]])
        named = layers.named_arrays(p)

        def loss(*arrays, d=d, p=p, named=named, ids=ids):
            tree = layers.tree_from_names(p, dict(zip(named, arrays, strict=True)))
            y = d(tree, backend.from_numpy(ids))
            return xp.sum(xp.multiply(y, y))

        _, gradients = backend.value_and_grad(loss)(*backend.from_numpy(tuple(named.values())))
        found.append({name: backend.to_numpy(g) for name, g in zip(named, gradients, strict=True)})
    for name, gradient in found[0].items():
        size = np.abs(gradient).max()
        assert size > 0, name
        np.testing.assert_allclose(found[1][name], gradient, rtol=0, atol=3e-4 * size, err_msg=name)


def test_a_hook_sees_layers_and_their_parts(rng, put, get):
    """Before the second norms; what it returns takes the place of what it was given to compute."""
    definition, seen = models.Decoder(V, C, H, INNER, num_layers=2, **ALL), {}
    model, ids = put(filled(definition, rng)), put(rng.integers(0, V, (2, 3)))

    def hook(name, function, h):
        seen[name] = function(h)
        return seen[name]

    plain = get(definition(model, ids))
    np.testing.assert_array_equal(get(definition(model, ids, hook=hook)), plain)
    assert list(seen) == [f"layers.{n}{part}" for n in range(2) for part in (".attention", ".feed_forward", "")]
    table = get(model.token)[get(ids)] * definition.embedding_scale
    x = table + rms(get(model.layers[0].attention_post_norm), get(seen["layers.0.attention"]), definition.epsilon)
    x += rms(get(model.layers[0].feed_forward_post_norm), get(seen["layers.0.feed_forward"]), definition.epsilon)
    np.testing.assert_allclose(get(seen["layers.0"]), x, rtol=1e-4, atol=1e-4)
    kept = get(definition(model, ids, hook=lambda name, function, h: h if name == "layers.1" else function(h)))
    shorter = models.Decoder(V, C, H, INNER, num_layers=1, **ALL | {"window": 3})
    np.testing.assert_array_equal(kept, get(shorter(model._replace(layers=model.layers[:1]), ids)))


def test_trees_name_their_layers(rng):
    d = models.Decoder(V, C, H, INNER, N, **LLAMA)
    names = list(layers.named_arrays(d.parameters))
    assert names[:2] == ["token", "layers.0.attention.query.weight"]
    assert names[-1] == "norm"
    p = d.init(0, xp=np)
    with pytest.raises(ValueError):
        layers.check_fit(d, p._replace(layers=p.layers[:1]))
