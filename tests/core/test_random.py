"""The counter-based generator: the published algorithm, independence, and dropout by position."""

import importlib

import numpy as np
import pytest
from fuzz_calls import VALID, built

import attention_core as ac
from attention_core.random import dropout_mask, fmix32, fold_in, hash_words, random_bits


def plain_fmix(word):
    """The published algorithm in Python integers."""
    word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
    word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
    return word ^ word >> 16


def plain_hash(*words):
    state = 0
    for index, word in enumerate(words, start=1):
        state = plain_fmix(state ^ plain_fmix(word ^ index * 0x9E3779B9 % 2**32))
    return state


WORDS = (0, 1, 2**32 - 1, 0x13198A2E, 2**31, 2**31 - 1, 681, 12345678)


def int32(word):
    return np.array([word], dtype=np.uint32).view(np.int32)


def test_the_mixer_is_the_published_one(put, get, xp):
    """Known answers: 1 gives 0x514e28b7, and 0xffffffff gives 0x81f16f39."""
    assert (plain_fmix(1), plain_fmix(2**32 - 1)) == (0x514E28B7, 0x81F16F39)
    mixed = get(fmix32(put(np.concatenate([int32(word) for word in WORDS])), xp=xp))
    assert mixed.view(np.uint32).tolist() == [plain_fmix(word) for word in WORDS]


def test_words_are_hashed_in_their_order(put, get, xp):
    result = get(hash_words(*(put(int32(word)) for word in WORDS), xp=xp))
    assert int(result.view(np.uint32)[0]) == plain_hash(*WORDS)
    assert plain_hash(1, 2) != plain_hash(2, 1)


def test_neighbours_and_neighbouring_seeds_are_uncorrelated(put, get, xp):
    like = put(np.zeros((2, 256, 256)))
    kept = [get(dropout_mask(ac.Dropout(0.5, seed), like, xp=xp)) - 0.5 for seed in (4, 5)]
    first = kept[0][0]
    pairs = [(first[1:], first[:-1]), (first[:, 1:], first[:, :-1]), (first, kept[0][1]), (first, kept[1][0])]
    for a, b in pairs:
        assert abs((a * b).mean() * 4) < 4.5 / 256
    assert np.abs(first.sum(0)).max() < 5 * 8
    assert np.abs(first.sum(1)).max() < 5 * 8


def test_bits_depend_on_seed_and_flat_position(get, xp):
    seed = 0x123456789ABCDEF0
    bits = get(random_bits(seed, (3, 5), xp=xp)).view(np.uint32).ravel()
    expected = [plain_hash(seed & 0xFFFFFFFF, seed >> 32, 0, n) for n in range(15)]
    assert bits.tolist() == expected


def test_array_seeds_are_words(put, get, xp):
    words = np.array([0x9ABCDEF0, 0x12345678], dtype=np.uint32).view(np.int32)
    whole = get(random_bits(0x123456789ABCDEF0, (7,), xp=xp))
    np.testing.assert_array_equal(get(random_bits(put(words), (7,), xp=xp)), whole)
    np.testing.assert_array_equal(get(random_bits(put(np.asarray(42)), (7,), xp=xp)), get(random_bits(42, (7,), xp=xp)))


def test_folding_in_numbers_gives_other_seeds(get, xp):
    seeds = {fold_in(seed, number, xp=xp) for seed in (0, 1) for number in range(4)}
    assert len(seeds) == 8


SHARE = plain_hash(77, 0, 1, 4, 2, 1) >> 8  # up to which the element at (1, 1, 2, 1) is kept


@pytest.mark.parametrize("rate", [0.3, SHARE / 2**24, (SHARE + 1) / 2**24, 1 - 2**-30])
def test_dropout_of_an_element_depends_on_its_position(rate, put, get, xp):
    seed = 77
    kept = get(dropout_mask(ac.Dropout(rate, seed), put(np.zeros((2, 3, 4, 5))), xp=xp))
    for b, h, i, j in np.ndindex(2, 3, 4, 5):
        assert kept[b, h, i, j] == (plain_hash(seed, 0, 1, b * 3 + h, i, j) >> 8 >= round(rate * 2**24))


SOURCES = {
    "numpy": lambda library: library.random.default_rng(3),
    "torch": lambda library: library.Generator().manual_seed(3),
    "jax": lambda library: library.random.key(3),
    "tensorflow": lambda library: library.random.Generator.from_seed(3),
}
"""Sources of seeds by library, each at its start."""


def has_source(backend):
    return backend.name in SOURCES


@pytest.mark.needs.with_args(has_source)
@pytest.mark.parametrize("name", [name for name, valid in VALID.items() if "dropout" in valid.options])
def test_sources_of_the_library_are_seeds_drawn_once_for_a_call(backend, put, get, name):
    library, (function, positional, options) = importlib.import_module(backend.name), built(VALID[name], put)
    del options["dropout"]

    def call(seed):
        result = function(*positional, **options, dropout=ac.Dropout(0.5, seed))
        return get(getattr(result, "output", result))

    source, same = SOURCES[backend.name](library), SOURCES[backend.name](library)
    seed = backend.draw_seed(same)
    if backend.name == "numpy":  # words of 32 bits, of either sign
        words = [backend.draw_seed(library.random.default_rng(other)) for other in range(20)]
        assert (np.min(words) < -(2**30), np.max(words) >= 2**30) == (True, True)
    if backend.name == "jax":
        assert (get(seed) != get(backend.draw_seed(library.random.key(4)))).any()
    np.testing.assert_array_equal(call(source), call(seed))
    if backend.name != "jax":  # whose keys have no state
        again = call(source)
        np.testing.assert_array_equal(again, call(backend.draw_seed(same)))
        assert not np.array_equal(again, call(seed))


@pytest.mark.optimized
def test_compiled_bits_are_the_eager_ones_beyond_any_overflow(backend, get, xp):
    """Longer than 2^31 / 0x9E3779B9 steps of a counter, where a compiler that rules out overflow would go astray."""
    for mode in backend.modes[1:]:
        compiled = backend.compile(lambda: random_bits(7, (5000,), xp=xp), mode=mode)
        np.testing.assert_array_equal(get(compiled()), get(random_bits(7, (5000,), xp=xp)))
