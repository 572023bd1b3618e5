"""The counter-based generator: known answers, independence, and dropout by position."""

import numpy as np
import pytest

import attention_core as ac
from attention_core.random import dropout_mask, fold_in, random_bits, threefry_2x32

ANSWERS = (  # key, counter, result: the known answers that accompany the authors' Random123
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
)


def signed(words):
    return [np.array([word], dtype=np.uint32).view(np.int32) for word in words]


def plain_threefry(key, counter):
    """The published algorithm in Python integers."""
    words = 2**32 - 1
    schedule = (*key, 0x1BD11BDA ^ key[0] ^ key[1])
    x, y = (counter[0] + key[0]) & words, (counter[1] + key[1]) & words
    for r in range(20):
        rotation = (13, 15, 26, 6, 17, 29, 16, 24)[r % 8]
        x = (x + y) & words
        y = ((y << rotation | y >> (32 - rotation)) & words) ^ x
        if r % 4 == 3:
            block = r // 4 + 1
            x = (x + schedule[block % 3]) & words
            y = (y + schedule[(block + 1) % 3] + block) & words
    return x, y


@pytest.mark.parametrize(("key", "counter", "result"), ANSWERS)
def test_known_answers(put, get, xp, key, counter, result):
    words = threefry_2x32(tuple(put(signed(key))), tuple(put(signed(counter))), xp=xp)
    assert [int(word[0]) & 0xFFFFFFFF for word in get(words)] == list(result)
    assert plain_threefry(key, counter) == result


def test_bits_depend_on_seed_and_flat_position(get, xp):
    seed = 0x123456789ABCDEF0
    bits = get(random_bits(seed, (3, 5), xp=xp)).view(np.uint32).ravel()
    expected = [plain_threefry((seed & 0xFFFFFFFF, seed >> 32), (n, 0))[0] for n in range(15)]
    assert bits.tolist() == expected


def test_array_seeds_are_words(put, get, xp):
    words = np.array([0x9ABCDEF0, 0x12345678], dtype=np.uint32).view(np.int32)
    whole = get(random_bits(0x123456789ABCDEF0, (7,), xp=xp))
    np.testing.assert_array_equal(get(random_bits(put(words), (7,), xp=xp)), whole)
    np.testing.assert_array_equal(get(random_bits(put(np.asarray(42)), (7,), xp=xp)), get(random_bits(42, (7,), xp=xp)))


def test_folding_in_numbers_gives_other_seeds(get, xp):
    seeds = {tuple(get(fold_in(seed, number, {}, xp=xp)).tolist()) for seed in (0, 1) for number in range(4)}
    assert len(seeds) == 8


def test_dropout_at_a_place_is_decided_by_its_place(put, get, xp):
    rate, seed = 0.3, 77
    kept = get(dropout_mask(ac.Dropout(rate, seed), put(np.zeros((2, 3, 4, 5))), xp=xp))
    for b, h, i, j in np.ndindex(2, 3, 4, 5):
        key = plain_threefry((seed, 0), (b * 3 + h, 0))
        assert kept[b, h, i, j] == (plain_threefry(key, (i, j))[0] >> 8 >= round(rate * 2**24))


def test_the_share_kept_is_one_minus_the_rate(put, get, xp):
    for rate in (0.1, 0.5, 0.9):
        kept = get(dropout_mask(ac.Dropout(rate, 1), put(np.zeros((200, 300))), xp=xp)).mean()
        assert abs(kept - (1 - rate)) < 4 * np.sqrt(rate * (1 - rate) / 60000)


@pytest.mark.parametrize(
    ("dropout", "error", "message"),
    [
        (0.5, TypeError, r"expected dropout as Dropout\(rate, seed\); got float"),
        (ac.Dropout(1.0, 1), ValueError, r"expected a dropout rate in \[0, 1\); got 1.0"),
        (ac.Dropout(-0.1, 1), ValueError, r"expected a dropout rate in \[0, 1\); got -0.1"),
        (ac.Dropout("much", 1), TypeError, "expected a dropout rate as a number; got str"),
        (ac.Dropout(0.5, -1), ValueError, r"expected a seed in \[0, 2\*\*64\); got -1"),
        (ac.Dropout(0.5, 2**64), ValueError, r"expected a seed in \[0, 2\*\*64\)"),
        (ac.Dropout(0.5, 1.5), TypeError, "expected a seed as an integer or an integer array; got float"),
        (ac.Dropout(0.5, True), TypeError, "expected a seed as an integer or an integer array; got bool"),
    ],
)
def test_wrong_dropout_is_named(put, dropout, error, message):
    x = put(np.ones((1, 2, 3)))
    with pytest.raises(error, match=message):
        ac.scaled_dot_product_attention(x, x, x, dropout=dropout)


def test_seed_arrays_of_the_wrong_kind_are_named(put):
    x = put(np.ones((1, 2, 3)))
    for seed, error, message in (
        (np.ones(3, dtype=int), ValueError, r"expected a seed of shape \(\) or \(2,\); got \(3,\)"),
        (np.ones(2), TypeError, "expected seed of an integer dtype; got float64"),
    ):
        with pytest.raises(error, match=message):
            ac.scaled_dot_product_attention(x, x, x, dropout=ac.Dropout(0.5, put(seed)))
