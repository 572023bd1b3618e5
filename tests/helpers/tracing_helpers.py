"""Functions to be traced, with their arrays."""

import numpy as np

import attention_core as ac
from attention_core.backend import get_backend
from attention_numpy.trees import map_arrays

# Compilers fuse and reorder: results differ by roundings, relative to the largest element.
CLOSE = {"float64": 1e-13, "float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}

RNG = np.random.default_rng(43)


def normal(*dims):
    return RNG.standard_normal(dims)


def affine(inputs, outputs):
    return ac.parameters.Linear(normal(inputs, outputs), normal(outputs))


C = 8

QKV = normal(2, 6, 5, 4), normal(2, 3, 7, 4), normal(2, 3, 7, 3)

MASK, BIAS = RNG.random((2, 1, 5, 7)) > 0.4, normal(6, 5, 7)

SEGMENTS = RNG.integers(0, 2, (2, 5)), RNG.integers(0, 2, (2, 7))

LENGTHS, OFFSETS, SEED = np.asarray([3, 0]), np.asarray([2, -3]), np.asarray([7, 9], dtype=np.int32)

HEADS = ac.parameters.MultiHeadAttention(affine(C, 12), affine(C, 6), affine(C, 10), affine(20, C))

SELF = ac.parameters.MultiHeadAttention(affine(C, C), affine(C, C), affine(C, C), affine(C, C))

NORM = ac.parameters.LayerNorm(normal(C), normal(C))

MLP = ac.parameters.FeedForward(affine(C, 10), affine(10, C))

LAYER = ac.parameters.EncoderLayer(SELF, NORM, MLP, ac.parameters.LayerNorm(normal(C), normal(C)))

TABLES = ac.parameters.Embeddings(normal(13, C), normal(9, C), normal(2, C), NORM)

# Scores of this layer are not scaled: with small kernels its finite differences are as good as those of the others.
SAGAN = ac.parameters.SaganAttention(
    *(ac.parameters.Linear(0.3 * normal(C, 3), normal(3)) for _ in range(2)),
    affine(C, 5),
    affine(5, C),
    np.asarray(0.7),
)

X, IDS, KEPT = normal(2, 5, C), RNG.integers(0, 13, (2, 5)), np.asarray([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def attend(**options):
    """Attention with options that are known while tracing."""
    return lambda query, key, value: ac.scaled_dot_product_attention(query, key, value, **options)


def masked(rule):
    """Attention under a mask made of traced arrays."""
    return lambda query, key, value, *arrays: ac.scaled_dot_product_attention(query, key, value, mask=rule(*arrays))


def everything(query, key, value, mask, bias, seed):
    options = {"mask": mask, "bias": bias, "is_causal": True, "scale": 0.4, "softcap": 3.0}
    options |= {"return_weights": True, "return_logsumexp": True, "dropout": ac.Dropout(0.25, seed)}
    return tuple(attend(**options)(query, key, value))


CASES = {
    "causal": (attend(is_causal=True), QKV),
    "window": (attend(mask=ac.SlidingWindow(left=1, right=2)), QKV),
    "softcap": (attend(softcap=2.0, scale=0.3), QKV),
    "flags": (lambda *qkv: tuple(attend(return_weights=True, return_logsumexp=True)(*qkv)), QKV),
    "mask": (masked(lambda mask: mask), (*QKV, MASK)),
    "combined": (
        masked(
            lambda lengths, offset: (
                (ac.KeyLengths(lengths) | ac.Causal(offset=offset)) & ac.SlidingWindow(left=3, right=2, offset=offset)
            )
        ),
        (*QKV, LENGTHS, OFFSETS),
    ),
    "combined_with_array": (
        masked(lambda mask, lengths: (mask | ac.KeyLengths(lengths)) & ~ac.SlidingWindow(left=0, right=0)),
        (*QKV, MASK, LENGTHS),
    ),
    "length": (attend(mask=ac.KeyLengths(4)), QKV),
    "lengths": (masked(ac.KeyLengths), (*QKV, LENGTHS)),
    "offsets": (masked(lambda offset: ac.Causal(offset=offset)), (*QKV, OFFSETS)),
    "segments": (masked(ac.Segments), (*QKV, *SEGMENTS)),
    "bias": (lambda q, k, v, bias: ac.scaled_dot_product_attention(q, k, v, bias=bias, is_causal=True), (*QKV, BIAS)),
    "scale_and_softcap": (
        lambda q, k, v, scale, cap: ac.scaled_dot_product_attention(q, k, v, scale=scale, softcap=cap),
        (*QKV, np.asarray(0.3), np.asarray(2.0)),
    ),
    "dropout": (lambda q, k, v, seed: attend(dropout=ac.Dropout(0.25, seed))(q, k, v), (*QKV, SEED)),
    "everything": (everything, (*QKV, MASK, BIAS, SEED)),
    "scores": (lambda q, k, mask: ac.attention_scores(q, k, mask=mask, softcap=2.0), (*QKV[:2], MASK)),
    "weights": (
        lambda q, k: ac.weights.attention_weights(q, k, queries=[2, 0], heads=[1], mask=ac.Causal(offset=1)),
        QKV[:2],
    ),
    "heads": (lambda x: ac.merge_heads(ac.split_heads(x, 2)), (X,)),
    "multi_head_attention": (
        lambda p, x, lengths: ac.multi_head_attention(
            p, x, num_heads=4, num_key_value_heads=2, is_causal=True, mask=ac.KeyLengths(lengths)
        ),
        (HEADS, X, LENGTHS),
    ),
    "encoder_layer": (
        lambda p, x, kept: ac.functions.encoder_layer(
            p, x, num_heads=2, mask=ac.masks.mask_from_padding(ac.masks.mask_from_integers(kept))
        ),
        (LAYER, X, KEPT),
    ),
    "encoder_layer_dropout": (
        lambda p, x, seed: ac.functions.encoder_layer(
            p, x, num_heads=2, norm_first=False, dropout=ac.Dropout(0.2, seed)
        ),
        (LAYER, X, SEED),
    ),
    "embed_tokens": (
        lambda p, ids, segments: ac.functions.embed_tokens(p, ids, segment_ids=segments),
        (TABLES, IDS, SEGMENTS[0]),
    ),
    "sagan_attention": (
        lambda p, x: tuple(ac.functions.sagan_attention(p, x, return_weights=True))[:2],
        (SAGAN, normal(2, 5, 6, C)),
    ),
    "sagan_attention_channels_first": (
        lambda p, x: ac.functions.sagan_attention(p, x, pool=False, data_format="channels_first"),
        (SAGAN, normal(2, C, 4, 3)),
    ),
    "spectral_norm": (lambda w, u: ac.functions.spectral_norm(w, u, iterations=2), (normal(3, 2, 4), normal(4))),
    "gelu": (ac.functions.gelu, (normal(3, 5),)),
    "linear": (ac.functions.linear, (SELF.query, X)),
    "layer_norm": (ac.functions.layer_norm, (NORM, X)),
    "rms_norm": (ac.functions.rms_norm, (NORM.scale, X)),
    "alibi": (lambda q, k, v, offset: attend(score_mod=ac.scores.alibi(6, offset=offset))(q, k, v), (*QKV, OFFSETS)),
    "relative_bias": (
        lambda q, k, v, table, offset: attend(score_mod=ac.scores.relative_bias(table, max_distance=7, offset=offset))(
            q, k, v
        ),
        (*QKV, TABLES.token[:8, :6], np.asarray(3)),
    ),
    "feed_forward": (ac.functions.feed_forward, (MLP, X)),
    "silu": (ac.functions.silu, (normal(3, 5),)),
    "gated_feed_forward": (
        ac.functions.gated_feed_forward,
        (ac.parameters.GatedFeedForward(affine(C, 10), affine(C, 10), affine(10, C)), X),
    ),
    **{
        f"rotary{suffix}": (
            lambda x, places, turn=turn: ac.functions.rotary_embedding(x, places, width=6, interleaved=turn),
            (normal(2, 3, 5, 8), RNG.integers(-(2**31), 2**31, (2, 5))),
        )
        for suffix, turn in (("", False), ("_interleaved", True))
    },
    "append": (
        lambda cache, *new: tuple(ac.cache.append(cache, *new)[:2]),
        (ac.cache.KeyValueCache(*QKV[1:], np.asarray([2, 5])), normal(2, 3, 2, 4), normal(2, 3, 2, 3)),
    ),
}

OF_INTEGERS = {"combined_with_array", "mask", "length", "offsets", "segments"}  # arrays
FEW = ("causal", "everything", "encoder_layer", "embed_tokens", "sagan_attention", "combined_with_array")

SIXTEEN = [("everything", "bfloat16"), ("encoder_layer", "float16"), ("embed_tokens", "bfloat16")]


def case(name, library, dtype=None):
    """A function with its arrays in the dtype that is asked for, which is float64 by default."""
    function, arrays = CASES[name]
    return function, get_backend(library).from_numpy(arrays, dtype=dtype)


def leaves(tree):
    found = []
    map_arrays(found.append, tree)
    return found


def assert_same(library, actual, expected):
    """Equal in dtype and, but for roundings, in values."""
    to_numpy = get_backend(library).to_numpy
    actual, expected = (leaves(to_numpy(tree)) for tree in (actual, expected))
    assert [result.dtype for result in actual] == [wanted.dtype for wanted in expected]
    assert expected
    exact = [wanted.astype(np.float64) for wanted in expected]
    largest = max(np.max(np.abs(wanted), initial=0.0, where=np.isfinite(wanted)) for wanted in exact)
    for result, wanted in zip(actual, exact, strict=True):
        np.testing.assert_allclose(result.astype(np.float64), wanted, rtol=0, atol=CLOSE[result.dtype.name] * largest)


def sized(batch, length, library):
    """Query, key, value, lengths: a batch of a size that the traced function has not seen."""
    rng = np.random.default_rng(batch * 100 + length)
    shapes = (batch, 6, length, 4), (batch, 3, length + 2, 4), (batch, 3, length + 2, 3)
    lengths = rng.integers(0, length, batch)
    return get_backend(library).from_numpy((*map(rng.standard_normal, shapes), lengths))


def attend_some(query, key, value, lengths):
    """Attention whose shapes and lengths are left open."""
    return ac.scaled_dot_product_attention(query, key, value, mask=ac.KeyLengths(lengths) & ac.Causal(offset=1))


def compiled(torch, function, backend="eager", dynamic=False):
    """The function as one graph; "eager" and "aot_eager" trace as "inductor" does, and generate no code, which is slow."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)


def module_of(torch, function):
    class Module(torch.nn.Module):
        def forward(self, *arrays):
            return function(*arrays)

    return Module()
