"""Reproducible arithmetic of small weights: as accurate as that of large ones, with the same bits everywhere."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from reproducible_helpers import EXACTLY, float32, same

import attention_core as ac
from attention_core import scaled_dot_product_attention as attention

GAPS = [0, 1, 5, 10, 15, 20, 26, 40, 60, 80]


def scored(scores, value):
    """Query, key and value (1, N, ...) whose scores are given numbers, with a scale of 1."""
    key = np.asarray(scores, np.float32)[None, :, None]
    return np.ones((1, 1, 1), np.float32), key, np.asarray(value, np.float32).reshape(1, len(scores), -1)


def exponentials(scores):
    """Exponentials of scores and their sum, as numbers of mpmath."""
    powers = [mpmath.exp(mpmath.mpf(float(score))) for score in scores]
    return powers, mpmath.fsum(powers)


def ulps(found, wanted, size):
    """The error in units in the last place of a size, which is a number of mpmath."""
    return float(abs(mpmath.mpf(float(found)) - wanted) / mpmath.mpf(float(np.spacing(np.float32(size)))))


@pytest.mark.parametrize("gap", GAPS)
def test_each_weight_is_correctly_rounded_however_small(gap, put, get):
    scores = [0, gap, gap / 3, -gap / 7]
    arrays = scored(scores, [1, 0, 2, 3])
    found = get(attention(*put(arrays), scale=1.0, return_weights=True, **EXACTLY)).weights
    with mpmath.workdps(60):
        powers, total = exponentials(arrays[1][0, :, 0])
        for weight, power in zip(found[0, 0], powers, strict=True):
            if power / total >= 2.0**-126:
                assert ulps(weight, power / total, power / total) <= 0.501
            else:
                assert weight == 0


@pytest.mark.needs("gradients", "float64")
def test_gradients_of_weights_are_those_of_float64(backend, rng):
    arrays = float32(rng, 2, 4, 7, 8), float32(rng, 2, 2, 11, 8), float32(rng, 2, 2, 11, 3), float32(rng, 4, 1, 11)
    factor = float32(rng, 2, 4, 7, 11)

    def gradients(dtype, arithmetic):
        xp = backend.namespace
        inputs = backend.from_numpy([x.astype(dtype) for x in (*arrays, factor)])

        def loss(query, key, value, bias):
            options = {"mask": ac.Causal(2), "softcap": 3.0, "arithmetic": arithmetic}
            found = attention(query, key, value, bias=bias, **options, return_weights=True)
            return xp.sum(found.weights * inputs[4]) + xp.sum(found.output)

        return backend.to_numpy(backend.value_and_grad(loss)(*inputs[:4])[1])

    for found, wanted in zip(gradients("float32", "reproducible"), gradients("float64", "fast"), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-7 * np.abs(wanted).max())


@pytest.mark.parametrize("mask", [None, ac.Causal(40), ac.SlidingWindow(20, 3)])
def test_the_size_of_blocks_does_not_show_in_weights(mask, backend, put, get, rng, monkeypatch):
    from attention_core._attention.blocks import plan

    arrays = float32(rng, 2, 2, 37, 8) * 9, float32(rng, 2, 1, 150, 8), float32(rng, 2, 1, 150, 3)
    options = {"mask": mask, "return_weights": True, **EXACTLY}
    whole = attention(*arrays, **options).weights
    monkeypatch.setattr(plan, "REPRODUCIBLE_KEYS", 64)
    monkeypatch.setattr(backend, "tuning", backend.tuning._replace(exact_scores=2**11))
    same(get(attention(*put(arrays), **options)).weights, whole)
