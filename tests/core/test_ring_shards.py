"""A ring of ranks: how far keys go round, what that sends, and large scores. Threads are ranks."""

import itertools

import numpy as np
import pytest
import shard_helpers

import attention_core as ac
from attention_core._attention.shards.ring import hops_of
from attention_core._attention.shards.splits import SPLITS
from attention_core.masks._band import Band

pytestmark = pytest.mark.needs(lambda backend: backend.name in ("torch", "numpy"))


BANDS = [Band(), Band(high=0), Band(-3, 0), Band(-9, 2), Band(0, 5), Band(-40, -30), Band(30, 40), Band(-3, 0, stop=7),
         Band(high=0, stop=0), Band(-200, -100), Band(-12, -10), Band(-6, 6), Band(-1, 0)]  # fmt: skip


@pytest.mark.needs(lambda backend: backend.name == "numpy")
@pytest.mark.parametrize("split", SPLITS)
def test_hops_are_the_fewest_that_bring_every_key_that_a_band_leaves(backend, split):
    rows = 6
    for size, band in itertools.product((1, 2, 3, 4, 8), BANDS):
        places = shard_helpers.places(size, split, rows).reshape(size, rows)
        needed = set()
        for rank, query in enumerate(places):
            for hop in range(size):
                key = places[rank - hop]
                distance = key - query[:, None]
                if ((distance >= band.low) & (distance <= band.high) & (key < band.stop)).any():
                    needed.add(hop)
        hops = hops_of(band, size, split, (rows, rows))

        def visited(first, count, size=size):
            return {(first + n) % size for n in range(count)}

        assert needed <= visited(*hops), (size, band)
        fewest = min(
            count - 1 + (first > 0)
            for first in range(size)
            for count in range(1, size + 1)
            if needed <= visited(first, count)
        )
        assert hops.rotations == fewest, (size, band)


def shards_of(put, group, heads=(4, 2), length=64, **options):
    """Shards, and those of query, key and value."""
    rng = np.random.default_rng(0)
    shards = ac.Shards(group, **options)
    shapes = (1, heads[0], length, 4), (1, heads[1], length, 4), (1, heads[1], length, 3)
    return shards, [ac.shard(put(rng.standard_normal(shape).astype(np.float32)), shards) for shape in shapes]


# The split, ranks, mask, and how often keys are sent; the first and the last hop are those of a rank itself or not.
SENT = [
    ("contiguous", 4, ac.SlidingWindow(left=7, right=0), (0, 2)),
    ("contiguous", 4, ac.SlidingWindow(left=17, right=0), (0, 3)),
    ("contiguous", 8, ac.SlidingWindow(left=3, right=3), (7, 3)),
    ("zigzag", 8, ac.SlidingWindow(left=3, right=0), (7, 3)),
    ("zigzag", 4, ac.Causal(), (0, 4)),
    ("contiguous", 3, ac.Causal(), (0, 3)),
]


@pytest.mark.parametrize(("split", "size", "mask", "hops"), SENT)
def test_a_ring_sends_what_the_guide_says(backend, put, ranks, split, size, mask, hops):
    """Forward L - 1 times, backward 2 (L - 1), once more if it begins, and if it ends, with the keys of others."""
    first, count = hops
    begins, ends = int(first > 0), int((first + count - 1) % size > 0)

    def step(group, backward):
        shards, (query, key, value) = shards_of(put, group, split=split, strategy="ring")

        def loss(query, key, value):
            return backend.namespace.sum(ac.scaled_dot_product_attention(query, key, value, mask=mask, shards=shards))

        if backward:
            backend.value_and_grad(loss)(query, key, value)
        else:
            loss(query, key, value)
        return ac.explain_attention(query, key, value, mask=mask, shards=shards)

    told = ranks(size, lambda group: step(group, False))[0]
    assert ranks.lent.calls == ["rotate"] * (count - 1 + begins) * size
    assert str(told).startswith("ring: keys and values go round")
    if backend.differentiates:
        ranks.lent.calls.clear()
        ranks(size, lambda group: step(group, True))
        assert len(ranks.lent.calls) == (3 * (count - 1) + 2 * begins + ends) * size


def test_a_ring_is_taken_where_a_window_leaves_fewer_than_half_of_its_hops(put, ranks):
    def taken(group, mask, heads, options):
        shards, arrays = shards_of(put, group, heads, split="contiguous")
        return ac.explain_attention(*arrays, mask=mask, shards=shards, **options).chosen

    window, wide = ac.SlidingWindow(left=7, right=0), ac.SlidingWindow(left=40, right=0)
    for size, mask, heads, options, expected in (
        (4, window, (4, 4), {}, "ring"),
        (3, window, (4, 4), {}, "gather"),
        (4, wide, (4, 4), {}, "heads"),
        (4, ac.Causal(), (4, 2), {}, "gather"),
        (4, window, (4, 2), {"arithmetic": "reproducible"}, "gather"),
    ):
        case = mask, heads, options
        assert ranks(size, lambda group, case=case: taken(group, *case)) == [expected] * size
        assert not ranks.lent.calls


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_keys_of_16_bits_travel_in_16_bits(put, ranks, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype

    def step(group):
        shards = ac.Shards(group, "contiguous", "ring")
        x = ac.shard(put(np.ones((1, 2, 8, 4), dtype)), shards)
        ac.scaled_dot_product_attention(x, x, x, shards=shards)

    ranks(2, step)
    assert ranks.lent.bytes == [2 * 2 * 2 * 4 * 4] * 2
