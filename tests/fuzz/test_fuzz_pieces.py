"""Pieces of the keys, and caches, against attention to the whole."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import fuzz_oracle as oracle
import numpy as np
import pytest
from fuzz_problems import Built, Problem, arrays_of, forced_blocks, problems
from hypothesis import strategies as st
from test_fuzz_bits import assert_same_bits
from test_fuzz_forward import differences, pool_of

import attention_core as ac

WHOLE = {"sinks": None, "weights": False, "logsumexp": True, "planted": None}


@st.composite
def pieces(draw: Any, backend: Any) -> tuple[Problem, tuple[int, ...], int]:
    """A problem, where to cut its keys, and a seed of the order of the pieces."""
    dtypes = tuple(name for name in ("float32", "float64", "float16", "bfloat16") if name in backend.dtypes)
    drawn = problems(pool=pool_of(backend), dtypes=dtypes, arithmetics=("fast", "reproducible"))
    problem = dataclasses.replace(draw(drawn), **WHOLE)
    cuts = draw(st.lists(st.integers(0, problem.columns), max_size=3).map(sorted))
    return problem, (0, *cuts, problem.columns), draw(st.integers(0, 5))


def check_pieces(case: tuple[Problem, tuple[int, ...], int], backend: Any) -> str:
    problem, cuts, order = case
    arrays, exact = arrays_of(problem), problem.arithmetic == "reproducible"
    built = Built(problem, backend.from_numpy, arrays)
    options = built.options()
    for name in ("return_weights", "return_logsumexp"):
        del options[name]
    spans = list(itertools.pairwise(cuts))
    np.random.default_rng(order).shuffle(spans)
    with forced_blocks(problem, backend):
        found = merged(problem, built, options, spans, exact=exact)
        if exact:
            whole = ac.scaled_dot_product_attention(*built.qkv, **built.options())
            output = backend.to_numpy(found.output).astype(arrays["query"].dtype)
            wanted = [backend.to_numpy(whole.output), backend.to_numpy(whole.logsumexp)]
            assert_same_bits([output, backend.to_numpy(found.logsumexp)], wanted)
            return "exact"
    found = ac.Attention(backend.to_numpy(found.output), None, backend.to_numpy(found.logsumexp))
    assert found.output.dtype.name == oracle.wide_name(problem.dtype)
    shares = differences(problem, arrays, found)
    assert max(shares.values()) <= len(spans) + 1, shares
    return "fast"


def merged(problem: Problem, built: Built, options: dict[str, Any], spans: list[Any], *, exact: bool) -> Any:
    """The pieces, merged and completed."""
    query, key, value = built.qkv

    def of(start: int, stop: int) -> tuple[list[Any], dict[str, Any]]:
        bias = options.get("bias")
        if bias is not None and len(bias.shape) and bias.shape[-1] != 1:
            bias = bias[..., start:stop]
        changes = {"key_start": start} | ({} if bias is None else {"bias": bias})
        return [query, key[..., start:stop, :], value[..., start:stop, :]], options | changes

    if not exact:
        parts = [of(*span) for span in spans]
        return ac.pieces.complete_partial(
            ac.pieces.merge_partials(
                *[ac.pieces.partial_attention(*arrays, **options_of) for arrays, options_of in parts]
            )
        )
    narrow = {"dropout", "implementation", "arithmetic"}
    parts = [of(*span) for span in spans]
    extents = [
        ac.pieces.attention_extent(*arrays, **{k: v for k, v in options_of.items() if k not in narrow})
        for arrays, options_of in parts
    ]
    extent = ac.pieces.merge_extents(*extents)
    partials = [ac.pieces.partial_attention(*arrays, **options_of, extent=extent) for arrays, options_of in parts]
    return ac.pieces.complete_partial(ac.pieces.merge_partials(*partials), dropout=options.get("dropout"))


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
