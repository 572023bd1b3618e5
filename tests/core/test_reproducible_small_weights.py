"""Reproducible arithmetic of small weights: correctly rounded, with the same bits everywhere."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from reproducible_helpers import EXACTLY

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
def test_each_weight_is_correctly_rounded_however_small(gap):
    scores = [0, gap, gap / 3, -gap / 7]
    arrays = scored(scores, [1, 0, 2, 3])
    found = attention(*arrays, scale=1.0, return_weights=True, **EXACTLY).weights
    with mpmath.workdps(60):
        powers, total = exponentials(arrays[1][0, :, 0])
        for weight, power in zip(found[0, 0], powers, strict=True):
            if power / total >= 2.0**-126:
                assert ulps(weight, power / total, power / total) <= 0.501
            else:
                assert weight == 0


def ordinary(*dims):
    return np.random.default_rng(7).standard_normal(dims)


SHAPES = {  # scores and values of a gap
    "two keys": lambda gap: ([0, gap], [[1], [0]]),
    "mirror": lambda gap: ([gap, 0], [[1], [0]]),
    "one-hot": lambda gap: ([0, gap], np.eye(2)),
    "identity": lambda gap: ([gap, *ordinary(63)], np.eye(64)),
    "sink of zeros": lambda gap: ([gap, *ordinary(70)], [[0] * 3, *ordinary(70, 3)]),
    "sink of small values": lambda gap: ([gap, *ordinary(70)], [[1e-9, 1e-5, 1e-3], *ordinary(70, 3)]),
    "sink of a large value": lambda gap: ([gap, *ordinary(70)], [[1e30, 1, 0], *ordinary(70, 3)]),
    "equal keys": lambda gap: ([gap, *[0] * 3000], [[0, 1], *ordinary(3000, 2)]),
    "tiny and huge values": lambda gap: ([0, gap, 2 * gap], [[1e37, 0], [1e-30, 1e37], [0, 1e-37]]),
}


def check_rounded(found, value, shares):
    """Outputs (E,) are averages with these weights, correctly rounded but for 2**-40 of the sum of their terms' sizes."""
    for output, column in zip(found, value.T, strict=True):
        terms = [share * mpmath.mpf(float(number)) for share, number in zip(shares, column, strict=True)]
        wanted, lost = mpmath.fsum(terms), 2.0**-40 * mpmath.fsum(map(abs, terms))
        if abs(wanted) + lost < 2.0**-126:
            assert output == 0
        else:
            assert abs(mpmath.mpf(float(output)) - wanted) <= np.spacing(np.float32(abs(wanted) + lost)) / 2 + lost


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("name", SHAPES)
def test_each_output_is_correctly_rounded_however_small_its_weights(name, gap):
    arrays = scored(*SHAPES[name](gap))
    found = attention(*arrays, scale=1.0, return_logsumexp=True, **EXACTLY)
    with mpmath.workdps(60):
        powers, total = exponentials(arrays[1][0, :, 0])
        check_rounded(found.output[0, 0], arrays[2][0], [power / total for power in powers])
        logsumexp = mpmath.log(total)
        assert abs(float(found.logsumexp[0, 0]) - logsumexp) <= 0.51 * np.spacing(np.float32(logsumexp)) + 2.0**-36


@pytest.mark.parametrize("gap", GAPS)
def test_outputs_are_correctly_rounded_where_the_largest_weight_is_dropped(gap):
    arrays = scored([gap, *ordinary(40)], ordinary(41, 3))
    units = scored([gap, *ordinary(40)], np.eye(41))
    for seed in range(40):
        dropout = ac.Dropout(0.5, seed)
        kept = attention(*(x.astype(np.float64) for x in units), scale=0.0, dropout=dropout)[0, 0] > 0
        if not kept[0]:
            break
    found = attention(*arrays, scale=1.0, dropout=dropout, **EXACTLY)
    with mpmath.workdps(60):
        powers, total = exponentials(arrays[1][0, :, 0])
        kept = [2 * power / total * bool(keep) for power, keep in zip(powers, kept, strict=True)]
        check_rounded(found[0, 0], arrays[2][0], kept)
