"""A sequence that ranks share: the published bits, and the cases of the kit. Threads are ranks."""

from dataclasses import replace

import numpy as np
import pytest
from shard_helpers import threads_as_ranks

from attention_conformance import check
from attention_conformance.golden.cases import IDENTICAL
from attention_conformance.golden.identical import computed_of, digest
from attention_conformance.hashes import published
from attention_conformance.sharded import whole_of
from attention_core import Shards, scaled_dot_product_attention
from sharding.ranks import SHARED_CASES, SIZES, attention_of_shards, over, ways_of

pytestmark = pytest.mark.needs(lambda backend: backend.name in ("torch", "numpy"))
SHARED = [case for case in IDENTICAL if case.name.startswith("shared")]

SUBNORMAL = "08-underflow-times-huge"  # the share of a rank is
ROUNDED = {"ring": {SUBNORMAL}}
"""What is lost where outputs are merged."""


@pytest.fixture
def shared(backend, monkeypatch):
    """``shared(size, strategy, split)``: attention of whole arrays by so many ranks."""
    with threads_as_ranks(backend, monkeypatch) as run:

        def by_ranks(size, strategy, split):
            def attention(*arrays, **options):
                whole = lambda group: whole_of(attention_of_shards, Shards(group, split, strategy))  # noqa: E731
                return run(size, lambda group: whole(group)(*arrays, **options))[-1]

            return attention

        yield by_ranks


@pytest.mark.needs("numpy")
@pytest.mark.parametrize("case", [case for case in SHARED if not case.variables], ids=lambda case: case.name)
def test_any_number_of_ranks_gives_the_published_bits(backend, shared, case):
    trees = case.trees()
    for size in SIZES[1::2]:
        for way in ways_of(case, size):
            found = computed_of(replace(case, function=over(case, shared(size, *way))), backend, "cpu", "eager", trees)
            assert digest(found) == published()[case.name], (size, way)


@pytest.mark.needs("torch")
def test_kernels_of_ranks_take_masks_over_the_whole(shared, put, get):
    """Queries that begin with the whole, as those of the first rank, are part of it nevertheless."""
    rng = np.random.default_rng(0)
    arrays = [put(rng.standard_normal((2, 4, length, 32)).astype(np.float32)) for length in (70, 130, 130)]
    for dims in ((2, 1, 70, 1), (1, 4, 70, 130), (70, 130)):
        mask = put(rng.random(dims) < 0.6)
        found = shared(2, "gather", "contiguous")(*arrays, mask=mask)
        np.testing.assert_allclose(get(found), get(scaled_dot_product_attention(*arrays, mask=mask)), atol=1e-5)


@pytest.mark.needs("numpy")
@pytest.mark.parametrize(
    ("size", "strategy", "split", "count"),
    [(3, "gather", "zigzag", 49), (3, "heads", "zigzag", 33), (2, "ring", "zigzag", 48), (8, "merge", "contiguous", 57)],
)  # fmt: skip
def test_ranks_answer_the_cases_of_the_kit(shared, size, strategy, split, count):
    """Padded queries and keys, grouped heads, all masks, numbers of all sizes; the oracle has 50 digits."""
    results = check(shared(size, strategy, split), backend="numpy", cases=SHARED_CASES, dtypes=["float32"])
    assert {each.case for each in results if each.passed is False} == ROUNDED.get(strategy, set())
    assert sum(each.passed is True for each in results) == count
