"""The cache of keys and values: what is written behind its lengths, and what is written over."""

import functools

import numpy as np
import pytest

from attention_core.cache import KeyValueCache, append, empty_cache

B, G, C, D, E = 2, 3, 8, 4, 7

pytestmark = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function at '_helpers"
)


def drawn(rng, length):
    """Key and value of a text."""
    return tuple(rng.standard_normal((B, G, length, width)) for width in (D, E))


def new_cache(xp, dtype="float64", **options):
    return empty_cache((B,), G, C, D, value_dim=E, dtype=getattr(xp, dtype), xp=xp, **options)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_rows_are_written_behind_the_lengths(count, ragged, put, get, rng):
    key, value = drawn(rng, length=C)
    lengths = np.asarray([2, 5], dtype=np.int32) if ragged else np.asarray(4, dtype=np.int32)
    new_key, new_value = drawn(rng, length=count)
    before = KeyValueCache(*map(put, (key, value, lengths)))
    cache = append(before, put(new_key), put(new_value))
    for array, was, old, new in ((cache.key, before.key, key, new_key), (cache.value, before.value, value, new_value)):
        np.testing.assert_array_equal(get(was), old)
        expected = old.copy()
        for sample, start in enumerate(np.broadcast_to(lengths, (B,))):
            expected[sample, :, start : start + count] = new[sample]
        np.testing.assert_array_equal(get(array), expected)
    np.testing.assert_array_equal(get(cache.length), lengths + count)
    assert get(cache.length).dtype == np.int32


@pytest.mark.parametrize(("count", "ragged"), [(1, False), (3, True)])
def test_a_donated_cache_is_written_over(count, ragged, backend, rng):
    """The same numbers; in the memory of the cache on libraries that write in place."""
    key, value = drawn(rng, length=C)
    lengths = np.asarray([2, 5], dtype=np.int32) if ragged else np.asarray(4, dtype=np.int32)
    new_key, new_value = drawn(rng, length=count)
    arrays = backend.from_numpy((KeyValueCache(key, value, lengths), new_key, new_value))
    expected = backend.to_numpy(append(*arrays))
    kept = backend.from_numpy((key, value, lengths))
    cache = append(*arrays, donate=True)
    for result, wanted in zip(backend.to_numpy(cache), expected, strict=True):
        np.testing.assert_array_equal(result, wanted)
    if backend.name in ("numpy", "torch"):
        pointer = {"numpy": lambda x: x.ctypes.data, "torch": lambda x: x.data_ptr()}[backend.name]
        assert [pointer(x) for x in cache[:2]] == [pointer(x) for x in arrays[0][:2]]
    if backend.name == "jax":
        assert arrays[0].key.is_deleted()
        assert arrays[0].value.is_deleted()
    for mode in backend.modes[1:]:
        compiled = backend.compile(functools.partial(append, donate=True), mode=mode)
        result = compiled(KeyValueCache(*kept), *backend.from_numpy((new_key, new_value)))
        for array, wanted in zip(backend.to_numpy(result), expected, strict=True):
            np.testing.assert_array_equal(array, wanted)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("ragged", [False, True])
def test_a_prompt_that_beams_share_is_copied_though_it_is_donated(ragged, put, get, rng):
    key, value = (x[:1] for x in drawn(rng, length=C))
    new_key, new_value = map(put, drawn(rng, length=1))
    lengths = put(np.full(B, 4) if ragged else np.asarray(4))
    shared = KeyValueCache(*(put(x).expand(B, -1, -1, -1) for x in (key, value)), lengths)
    expected = append(shared, new_key, new_value)
    for found, wanted in zip(append(shared, new_key, new_value, donate=True), expected, strict=True):
        np.testing.assert_array_equal(get(found), get(wanted))


@pytest.mark.needs("compilation")
@pytest.mark.parametrize("count", [1, 3])
def test_what_does_not_fit_is_dropped_where_lengths_cannot_be_read(count, backend, rng):
    key, value = drawn(rng, length=C)
    new_key, new_value = drawn(rng, length=count)
    lengths = np.asarray([C - 1, C], dtype=np.int32)
    arrays = backend.from_numpy((KeyValueCache(key, value, lengths), new_key, new_value))
    for mode in backend.modes[1:]:
        cache = backend.to_numpy(backend.compile(append, mode=mode)(*arrays))
        expected = key.copy()
        expected[0, :, C - 1] = new_key[0, :, 0]
        np.testing.assert_array_equal(cache.key, expected)
        np.testing.assert_array_equal(cache.length, lengths + count)


def test_an_empty_cache(get, xp):
    cache = empty_cache((2, 5), 3, 8, 4, dtype=xp.float64, xp=xp)
    assert [get(array).shape for array in cache] == [(2, 5, 3, 8, 4), (2, 5, 3, 8, 4), ()]
    assert [get(array).dtype for array in cache] == [np.float64, np.float64, np.int32]
    assert get(empty_cache((), 3, 8, 4, value_dim=7, ragged=True, xp=xp).value).shape == (3, 8, 7)
    assert get(new_cache(xp, ragged=True).length).tolist() == [0, 0]
