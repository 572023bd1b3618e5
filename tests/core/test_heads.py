"""Splitting channels into heads, and merging them."""

import numpy as np
import pytest

import attention_core as ac
from attention_core.backend import repeat_kv


def test_head_h_takes_channels_from_h_times_width(rng, put, get):
    x = rng.standard_normal((2, 5, 12))
    heads = get(ac.split_heads(put(x), 3))
    assert heads.shape == (2, 3, 5, 4)
    for h in range(3):
        np.testing.assert_array_equal(heads[:, h], x[..., 4 * h : 4 * h + 4])


@pytest.mark.parametrize("shape", [(5, 12), (2, 5, 12), (2, 3, 5, 12), (0, 5, 12), (2, 0, 12)])
def test_merging_undoes_splitting(rng, put, get, shape):
    x = rng.standard_normal(shape)
    np.testing.assert_array_equal(get(ac.merge_heads(ac.split_heads(put(x), 3))), x)


def test_repeated_heads_keep_their_order(put, get, xp):
    x = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    repeated = get(repeat_kv(put(x), 2, xp=xp))
    assert repeated.shape == (2, 6, 4, 5)
    for head in range(6):
        np.testing.assert_array_equal(repeated[:, head], x[:, head // 2])
