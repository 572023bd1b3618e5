"""NaN, infinities and scores of any size in blocks, and what is masked of them in the dense form, too."""

import math

import numpy as np
import pytest
from blockwise_helpers import (
    LENGTHS,
    NONFINITE,
    RUNS,
    TUNING,
    B,
    G,
    H,
    M,
    N,
    assert_equal,
    assert_same,
    attention,
    derivatives,
    qkv,
)

import attention_core as ac
from attention_core.backend import array_namespace
from attention_core.masks import And


@pytest.fixture(autouse=True)
def small(backend, monkeypatch):
    """Blocks so small that there are several."""
    monkeypatch.setattr(backend, "tuning", TUNING if backend.loops.traced else RUNS)


@pytest.mark.needs(
    lambda kind, nonfinite, backend: not backend.loops.traced or (kind, nonfinite) in (("array", math.nan),)
)
@pytest.mark.parametrize("implementation", ["blockwise", "dense"])
@pytest.mark.parametrize("nonfinite", NONFINITE)
@pytest.mark.parametrize("kind", ["array", "lengths", "bias"])
def test_what_is_masked_leaks_neither_forward_nor_backward(kind, nonfinite, implementation, backend, rng):
    arrays = qkv(rng)
    empty, unseen = 2, N - 1  # a fully masked row, a key that no query attends to
    allowed = np.broadcast_to(np.arange(N) < unseen, (M, N)) & (np.arange(M) != empty)[:, None]
    bias = np.where(allowed, rng.standard_normal((M, N)), 0.0 if kind == "array" else -math.inf)
    if kind == "lengths":
        bias[:, unseen] = 0.0
    options = {
        "array": lambda bias, mask: {"bias": bias, "mask": mask, "softcap": 2.0},
        "lengths": lambda bias, mask: {"bias": bias, "mask": ac.KeyLengths(unseen)},
        "bias": lambda bias, mask: {"bias": bias},
    }[kind]
    spoilt = [x.copy() for x in (*arrays, bias)]
    spoilt[0][:, 1, empty] = spoilt[1][:, :, unseen] = spoilt[2][:, :, unseen] = nonfinite
    if kind == "array":
        spoilt[3][~allowed] = nonfinite
    with np.errstate(invalid="ignore"):
        (clean,) = derivatives(backend, options, [*arrays, bias, allowed], (implementation,))
        (found,) = derivatives(backend, options, [*spoilt, allowed], (implementation,))
    for each in found:
        assert not np.isnan(each).any()
    assert_same(found, clean)
    if backend.differentiates:
        _, _, of_query, of_key, of_value, of_bias = found
        assert not np.any(of_query[:, :, empty])
        assert not np.any(of_key[:, :, unseen])
        assert not np.any(of_value[:, :, unseen])
        assert not np.any(of_bias[~allowed])


def test_a_scale_that_makes_what_is_masked_overflow(backend):
    """Finite numbers, of which the scale makes infinity minus infinity."""
    key = np.full((1, 1, 3, 2), 1e-30)
    key[0, 0, 2] = 1e10
    query, key, value = backend.from_numpy(
        [np.full((1, 1, 2, 2), [1.0, -1.0]), key, np.ones((1, 1, 3, 2))], dtype="float32"
    )
    mask = backend.from_numpy(np.array([True, True, False]))
    with np.errstate(over="ignore", invalid="ignore"):
        for implementation in ("auto", "dense", "blockwise"):
            found = attention(query, key, value, mask=mask, scale=1e30, implementation=implementation)
            np.testing.assert_array_equal(backend.to_numpy(found), np.ones((1, 1, 2, 2)))


@pytest.mark.needs("untraced loops")
@pytest.mark.parametrize("nonfinite", [*NONFINITE, 3e38])
def test_a_bias_that_is_masked_leaks_neither_forward_nor_backward(nonfinite, backend, rng):
    """While queries, keys and values are finite."""
    arrays, bias, allowed = qkv(rng), rng.standard_normal((M, N)), rng.random((M, N)) < 0.6
    spoilt = np.where(allowed, bias, nonfinite)
    clean, found = (
        derivatives(backend, lambda bias, mask: {"bias": bias, "mask": mask}, [*arrays, each, allowed], ("blockwise",))
        for each in (bias, spoilt)
    )
    assert_same(found[0], clean[0])


@pytest.mark.needs(
    lambda masked, argument, nonfinite, backend: (
        not backend.loops.traced or (masked, argument, nonfinite) in ((True, "value", math.inf),)
    ),
    lambda argument, nonfinite: argument == "value" or nonfinite != -math.inf,  # which masks, or has no weight
)
@pytest.mark.parametrize("nonfinite", NONFINITE)
@pytest.mark.parametrize("argument", ["query", "key", "value", "bias"])
@pytest.mark.parametrize("masked", [True, False])
def test_what_is_attended_shows_as_in_the_dense_form(masked, argument, nonfinite, backend, rng):
    arrays = [*map(np.abs, qkv(rng)), rng.standard_normal((M, N))]
    target = arrays[("query", "key", "value", "bias").index(argument)]
    target[..., 6, 2] = nonfinite

    def options(bias):
        return ({"mask": ac.SlidingWindow(left=3, right=2)} if masked else {}) | (
            {"bias": bias} if masked or argument == "bias" else {}
        )

    with np.errstate(invalid="ignore"):
        dense, blocks = derivatives(backend, options, arrays, ("dense", "blockwise"))
    assert_same(blocks[:2], dense[:2])
    for found, expected in zip(blocks, dense, strict=True):
        seen = np.isfinite(expected)  # blocks that are skipped may keep a nan from more
        np.testing.assert_allclose(found[seen], expected[seen], rtol=0, atol=1e-12)


def test_an_infinite_value_changes_only_queries_that_attend_to_it(backend, rng):
    arrays = qkv(rng)
    arrays[2][0, 0, 5, 1], arrays[2][0, 0, 2, 1], arrays[2][0, 0, 2, 3] = math.inf, -math.inf, math.nan
    result = attention(*backend.from_numpy(arrays), is_causal=True, implementation="blockwise")
    output = backend.to_numpy(result)
    np.testing.assert_array_equal(np.isnan(output[0, :2, :, 3]), np.broadcast_to(np.arange(M) >= 2, (2, M)))
    expected = [0.0] * 2 + [-math.inf] * 3 + [math.nan] * 6
    np.testing.assert_array_equal(np.where(np.isfinite(output[0, 0, :, 1]), 0.0, output[0, 0, :, 1]), expected)
    assert np.isfinite(output[0, :, :, 0]).all()
    assert np.isfinite(output[1:]).all()


def test_a_fully_masked_row_gives_exactly_zero(backend, rng):
    (found,) = derivatives(
        backend,
        lambda lengths: {"mask": And(ac.KeyLengths(lengths), ac.Causal(offset=-2))},
        [*qkv(rng), LENGTHS],
        ("blockwise",),
    )
    output, logsumexp, *gradients = found
    assert not np.any(output[1])
    assert not np.any(output[:, :, :2])
    if gradients:
        assert not any(np.any(gradient[1]) for gradient in gradients)
        assert not np.any(gradients[0][:, :, :2])
    else:
        assert (logsumexp[1] == -math.inf).all()
        assert (logsumexp[:, :, :2] == -math.inf).all()
        assert np.isfinite(logsumexp[0, :, 2:]).all()


def raised(scores, *_):
    return array_namespace(scores).add(scores, 1000.0)


@pytest.mark.needs("gradients")
def test_scores_of_any_size_leave_gradients_finite(backend, rng):
    """Rows that only fill up a block have such scores too."""
    assert_equal(backend, lambda: {"score_mod": raised}, qkv(rng), close=1e-10)


def lowered(scores, batch, head, query, key):
    xp = array_namespace(scores)
    return xp.where(xp.less(key, 10), -math.inf, scores)


@pytest.mark.needs("untraced loops")
def test_a_whole_block_of_scores_may_be_minus_infinity(backend, rng):
    assert_equal(backend, lambda: {"score_mod": lowered}, qkv(rng))


@pytest.mark.needs(lambda size, backend: not backend.loops.traced or size in (3e38,))
@pytest.mark.parametrize("size", [3e38, -3e38])
def test_biases_of_any_finite_size_are_no_masks(size, backend, rng):
    bias = np.where(np.arange(N) < 8, np.float32(size), 0.0)
    query, key, value, bias = backend.from_numpy([*qkv(rng), bias], dtype="float32")
    for some_bias in (bias, backend.from_numpy(np.full((N,), size), dtype="float32")):
        with np.errstate(over="ignore"):
            dense, blocks = (
                backend.to_numpy(
                    tuple(attention(query, key, value, bias=some_bias, return_logsumexp=True, implementation=name))
                )
                for name in ("dense", "blockwise")
            )
        np.testing.assert_allclose(blocks[0], dense[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(blocks[2], dense[2], rtol=1e-5)


@pytest.mark.needs("untraced loops")
@pytest.mark.parametrize("empty", [(0, H, G, M, N), (B, H, G, 0, N), (B, H, G, M, 0)])
def test_empty_axes(empty, backend, rng):
    entries, heads, groups, rows, columns = empty
    arrays = qkv(rng, (entries,), heads, groups, rows, columns)
    found = assert_equal(backend, lambda: {"mask": ac.Causal(offset=1)}, arrays)
    assert not np.any(found[0])
