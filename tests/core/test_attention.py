"""The definition of attention, and its contract line by line."""

import functools
import math

import numpy as np
import pytest
from backend_helpers import close as near

import attention_core as ac
from attention_core import scaled_dot_product_attention as attention

close = functools.partial(near, ulps=32)

B, H, G, M, N, D, E = 2, 6, 3, 4, 5, 7, 8  # all different, so that a swapped axis cannot pass


def definition(q, k, v, allowed=None, bias=None, scale=None, softcap=None):
    """Attention of one head by the formula: Python floats, one query and one key at a time."""
    scale = 1 / math.sqrt(len(q[0])) if scale is None else scale
    outputs, weights, normalizers = [], [], []
    for i, query in enumerate(q):
        scores = {}
        for j, key in enumerate(k):
            if allowed is None or allowed[i][j]:
                score = math.fsum(scale * a * b for a, b in zip(query, key, strict=True))
                score = score if softcap is None else softcap * math.tanh(score / softcap)
                scores[j] = score + (0 if bias is None else bias[i][j])
        total = math.fsum(math.exp(s) for s in scores.values())
        row = [math.exp(scores[j]) / total if j in scores else 0.0 for j in range(len(k))]
        outputs.append([math.fsum(p * value[e] for p, value in zip(row, v, strict=True)) for e in range(len(v[0]))])
        weights.append(row)
        normalizers.append(math.log(total) if scores else -math.inf)
    return np.array(outputs), np.array(weights), np.array(normalizers)


def reference(q, k, v, allowed=None, bias=None, **options):
    """The definition for every sample and head; key heads repeat in order."""
    leading, times = q.shape[:-2], q.shape[-3] // k.shape[-3]
    rows = (*leading, q.shape[-2], k.shape[-2])
    allowed = None if allowed is None else np.broadcast_to(allowed, rows)
    bias = None if bias is None else np.broadcast_to(bias, rows)
    results = [np.empty((*leading, *ends)) for ends in ((q.shape[-2], v.shape[-1]), rows[-2:], (q.shape[-2],))]
    for index in np.ndindex(leading):
        shared = (*index[:-1], index[-1] // times)
        mask, added = (None if x is None else x[index] for x in (allowed, bias))
        for result, part in zip(
            results, definition(q[index], k[shared], v[shared], mask, added, **options), strict=True
        ):
            result[index] = part
    return results


@pytest.fixture
def qkv(rng):
    shapes = ((B, H, M, D), (B, G, N, D), (B, G, N, E))
    return [rng.standard_normal(shape) for shape in shapes]


@pytest.fixture
def mask(rng):
    allowed = rng.random((B, H, M, N)) < 0.6
    allowed[0, 1, 2] = False
    return allowed


def test_equals_the_definition(qkv, put, get):
    result = attention(*put(qkv), return_weights=True, return_logsumexp=True)
    for got, expected in zip(get(result), reference(*qkv), strict=True):
        close(got, expected)


def test_everything_at_once_equals_the_definition(qkv, mask, rng, put, get):
    bias = rng.standard_normal((H, M, N))
    numbers = {"scale": 0.3, "softcap": 1.5}
    options = {name: put(np.asarray(number)) for name, number in numbers.items()}
    result = attention(
        *put(qkv), mask=put(mask), bias=put(bias), is_causal=True, **options, return_weights=True, return_logsumexp=True
    )
    allowed = mask & np.tri(M, N, dtype=bool)
    for got, expected in zip(get(result), reference(*qkv, allowed, bias, **numbers), strict=True):
        close(got, expected)


@pytest.mark.parametrize("shape", [(N,), (1, N), (M, 1), (M, N), (H, 1, 1), (1, M, N), (B, 1, 1, N), (B, H, M, N), ()])
def test_contract_01_masks_and_biases_broadcast(qkv, rng, put, get, shape):
    allowed, bias = rng.random(shape) < 0.7, rng.standard_normal(shape)
    close(get(attention(*put(qkv), mask=put(np.asarray(allowed)))), reference(*qkv, allowed)[0])
    close(get(attention(*put(qkv), bias=put(np.asarray(bias)))), reference(*qkv, None, bias)[0])


def test_a_bias_may_hide_what_a_rule_leaves(qkv, put, get):
    """By its numbers in each call, so that no rule alone says that a query has a key."""
    bias = np.where(np.arange(M)[:, None] == 2, -math.inf, np.zeros((M, N)))
    output = get(attention(*put(qkv), bias=put(bias), is_causal=True, implementation="dense"))
    assert (output[..., 2, :] == 0).all()
    np.testing.assert_allclose(output, reference(*qkv, np.tri(M, N, dtype=bool) & (bias == 0))[0], atol=1e-12)


def test_contract_04_is_decided_by_the_mask_never_by_the_scores(put, get):
    """Scores that overflow to -inf are not a mask: the formula gives nan there, and must not give a quiet 0."""
    big = np.full((1, 1, 1, 4), 1e300)
    for options in ({}, {"mask": put(np.ones((1, 1), dtype=bool))}):
        result = get(attention(*put([big, -big, np.ones((1, 1, 1, 2))]), **options))
        assert np.isnan(result).all()


@pytest.mark.needs("dtype")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_contract_08_sixteen_bits_are_computed_wide_and_rounded_once(qkv, mask, backend, put, get, dtype):
    """A kernel that ``"auto"`` takes rounds weights, too, which costs at most a unit of the sum of p |v|."""
    narrow = put(qkv, dtype=dtype)
    wide = put([np.asarray(x, dtype=np.float32) for x in get(narrow)])
    options = {"mask": put(mask), "return_weights": True, "return_logsumexp": True}
    expected = attention(*wide, **options)
    exact = attention(*narrow, **options, implementation="dense")
    for got, wanted in zip(exact[:2], expected[:2], strict=True):
        assert str(get(got).dtype) == dtype
        np.testing.assert_array_equal(get(got), get(wanted).astype(get(got).dtype))
    np.testing.assert_allclose(get(exact.logsumexp), get(expected.logsumexp), rtol=2e-6, atol=1e-6)
    result = attention(*narrow, **options)
    scale = get(attention(*wide[:2], abs(wide[2]), mask=put(mask), implementation="dense"))
    units = 2.0 ** (np.floor(np.log2(np.maximum(scale, 2.0**-14))) - (7 if dtype == "bfloat16" else 10))
    difference = get(result.output).astype(np.float64) - get(expected.output)
    assert (np.abs(difference) <= 1.51 * units).all()
    np.testing.assert_array_equal(get(result.weights), get(exact.weights))
    assert get(result.logsumexp).dtype == np.float32


def test_contract_08_dtypes_are_not_promoted(qkv, put):
    q, k, v = put(qkv)
    narrow = put(qkv, dtype="float32")
    attention(q, k, v)  # whose signature is remembered
    for arrays in ((q, narrow[1], v), (q, k, narrow[2])):
        with pytest.raises(TypeError):
            attention(*arrays)


def test_scores_go_as_far_as_the_arguments(qkv, mask, rng, put, get):
    q, k, _ = qkv
    bias = rng.standard_normal((M, N))
    raw = np.einsum("bhmd,bhnd->bhmn", q * 0.5, np.repeat(k, H // G, axis=1))
    capped = 2 * np.tanh(raw / 2)
    close(get(ac.attention_scores(*put([q, k]), scale=0.5)), raw)
    close(get(ac.attention_scores(*put([q, k]), scale=0.5, softcap=2.0)), capped)
    close(get(ac.attention_scores(*put([q, k]), scale=0.5, softcap=2.0, bias=put(bias))), capped + bias)
    masked = get(ac.attention_scores(*put([q, k]), scale=0.5, mask=put(mask)))
    close(masked[mask], raw[mask])
    assert (masked[~mask] == -np.inf).all()


# Errors


def error_bound(n_keys, depth, kappa, n_blocks):
    """The bound of docs/explanation/numerics.md, in units in the last place of S."""
    return 2 * n_keys + 2 * (depth + 4) * kappa + 9 + n_blocks * 2 * (2 * kappa + 6)


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "auto"])
@pytest.mark.parametrize(
    ("n_keys", "depth", "deviation", "equal"),
    [(3, 16, 0.1, False), (17, 64, 1, False), (130, 8, 5, False), (1030, 5, 2, False), (10_000, 4, 0.1, True)],
)
def test_errors_keep_the_derived_bound(xp, rng, implementation, n_keys, depth, deviation, equal):
    q, k, v = (
        rng.standard_normal(dims).astype(np.float32)
        for dims in ((1, 1, 7, depth), (1, 1, n_keys, depth), (1, 1, n_keys, 3))
    )
    q *= np.float32(deviation)
    if equal:
        k[:], v[:] = k[..., :1, :], v[..., :1, :]
    output = attention(*map(xp.asarray, (q, k, v)), implementation=implementation)
    expected, weights, _ = definition(*(x[0, 0].astype(float).tolist() for x in (q, k, v)))
    kappa = np.max(np.abs(q[0, 0].astype(float)) @ np.abs(k[0, 0].astype(float)).T) / math.sqrt(depth)
    scale = np.spacing((weights @ np.abs(v[0, 0].astype(float))).astype(np.float32))
    errors = np.abs(np.asarray(output)[0, 0].astype(float) - expected) / scale
    assert errors.max() <= error_bound(n_keys, depth, kappa, -(-n_keys // 128))


@pytest.mark.parametrize(
    "options",
    [{"implementation": "dense"}, {"implementation": "blockwise"}, {"scale": 2.0}, {"arithmetic": "reproducible"}],
)
def test_vectors_without_elements_average_the_values(options, put, get):
    query, key = np.zeros((2, 3, 5, 0), np.float32), np.zeros((2, 3, 7, 0), np.float32)
    value = np.arange(2 * 3 * 7 * 4, dtype=np.float32).reshape(2, 3, 7, 4)
    arrays = put((query, key, value))
    found = get(ac.scaled_dot_product_attention(*arrays, **options))
    np.testing.assert_allclose(found, np.broadcast_to(value.mean(axis=-2, keepdims=True), found.shape), rtol=1e-6)
    causal = get(ac.scaled_dot_product_attention(*arrays, is_causal=True, **options))
    np.testing.assert_allclose(causal[..., 1, :], value[..., :2, :].mean(axis=-2), rtol=1e-6)
