"""NaN, infinities and scores of any size in blocks, and what is masked of them in the dense form, too."""

import math

import numpy as np
import pytest
from blockwise_helpers import (
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


@pytest.mark.needs("untraced loops")
@pytest.mark.parametrize("empty", [(0, H, G, M, N), (B, H, G, 0, N), (B, H, G, M, 0)])
def test_empty_axes(empty, backend, rng):
    entries, heads, groups, rows, columns = empty
    arrays = qkv(rng, (entries,), heads, groups, rows, columns)
    found = assert_equal(backend, lambda: {"mask": ac.Causal(offset=1)}, arrays)
    assert not np.any(found[0])
