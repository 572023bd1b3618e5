"""Pieces of the keys, and caches, against attention to the whole."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fuzz_problems import Drawn, called, dtypes_of, pool_of, problems
from hypothesis import strategies as st
from test_fuzz_forward import differences

import attention_core as ac
from attention_conformance.oracle.attention import attention

Spans = tuple[tuple[int, int], ...]


@st.composite
def pieces(draw: Any, backend: Any) -> tuple[Drawn, Spans]:
    """A problem, and the spans into which its keys are cut."""
    drawn = problems(pool=pool_of(backend), dtypes=dtypes_of(backend), arithmetics=("fast",))
    problem = replace(draw(drawn).told(return_weights=None), sinks=None, planted=None)
    cuts = draw(st.lists(st.integers(0, problem.keys), max_size=3).map(sorted))
    return problem, tuple(draw(st.permutations(list(itertools.pairwise((0, *cuts, problem.keys))))))


def check_pieces(case: tuple[Drawn, Spans], backend: Any) -> None:
    drawn, spans = case
    problem = drawn.problem()
    found = called(drawn, problem.changed(pieces=spans), backend)
    shares = differences(drawn, problem, attention(problem), found)
    assert max(shares.values()) <= len(spans) + 1, shares


@st.composite
def appends(draw: Any) -> tuple[Any, ...]:
    """Sizes of a cache, a seed, and what is appended: numbers of positions, with how many of them count."""
    leading = draw(st.sampled_from([(), (2,), (2, 1)]))
    ragged = draw(st.booleans()) and leading != ()
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    kept = draw(st.booleans()) if ragged else False
    return (
        leading,
        ragged,
        tuple(counts),
        kept,
        draw(st.integers(0, 99)),
        draw(st.sampled_from(["fast", "reproducible"])),
    )


def check_cache(case: tuple[Any, ...], backend: Any) -> None:
    """A cache holds what was appended, and attention to it is attention to the keys before each query."""
    leading, ragged, counts, kept, seed, arithmetic = case
    xp, put, get, rng = backend.namespace, backend.from_numpy, backend.to_numpy, np.random.default_rng(seed)
    capacity = sum(counts) + 1
    cache = ac.cache.empty_cache(leading, 2, capacity, 3, value_dim=4, ragged=ragged, xp=xp)
    held = [np.zeros((*leading, 2, capacity, width), np.float32) for width in (3, 4)]
    lengths = np.zeros(leading if ragged else (), np.int64)
    for count in counts:
        new = [rng.standard_normal((*leading, 2, count, width)).astype(np.float32) for width in (3, 4)]
        number = rng.integers(0, count + 1, leading).astype(np.int32) if kept else None
        cache = ac.cache.append(cache, *map(put, new), num_new=None if number is None else put(number))
        for sample in np.ndindex(*leading):
            start = int(lengths[sample] if ragged else lengths)
            for array, rows in zip(held, new, strict=True):
                array[(*sample, slice(None), slice(start, start + count))] = rows[sample]
        before, lengths = lengths, lengths + (count if number is None else number)
        np.testing.assert_array_equal(get(cache.length), lengths)
        query = rng.standard_normal((*leading, 4, count, 3)).astype(np.float32)
        added = count if number is None else put(number)
        if number is None and count == 0:
            continue
        found = get(
            ac.scaled_dot_product_attention(
                put(query), cache.key, cache.value, mask=ac.cache.cache_mask(cache, added), arithmetic=arithmetic
            )
        )
        allowed = np.arange(capacity) <= np.arange(count)[:, None] + before[..., None, None]
        if number is not None:
            allowed &= np.arange(capacity) < lengths[..., None, None]
        mask = put(allowed[..., None, :, :] if ragged else allowed)
        wanted = get(ac.scaled_dot_product_attention(put(query), *map(put, held), mask=mask, arithmetic=arithmetic))
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    for array, rows in zip(cache[:2], held, strict=True):
        for sample in np.ndindex(*leading):
            filled = int(lengths[sample] if ragged else lengths)
            np.testing.assert_array_equal(
                get(array)[(*sample, slice(None), slice(0, filled))], rows[(*sample, slice(None), slice(0, filled))]
            )


@pytest.mark.needs(lambda backend: backend.name != "array_api_strict")
@pytest.mark.cases(12)
def test_pieces(fuzz, backend):
    fuzz(lambda case: check_pieces(case, backend), pieces(backend))


@pytest.mark.cases(12)
def test_caches(fuzz, backend):
    fuzz(lambda case: check_cache(case, backend), appends())
