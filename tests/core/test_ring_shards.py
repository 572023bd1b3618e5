"""A ring of ranks: how far keys go round, what that sends, and large scores. Threads are ranks."""

import itertools

import numpy as np
import pytest
import shard_helpers

import attention_core as ac

pytestmark = pytest.mark.needs(lambda backend: backend.name in ("torch", "numpy"))


def window(first, last):
    """From so many keys before a query, or behind it, to so many."""
    return ac.SlidingWindow(left=0, right=last - first, offset=first)


MASKS = [
    ac.SlidingWindow(),
    ac.Causal(),
    ac.SlidingWindow(left=3, right=0) & ac.KeyLengths(7),
    ac.Causal() & ac.KeyLengths(0),
]
ENDS = (-3, 0), (-9, 2), (0, 5), (-40, -30), (30, 40), (-200, -100), (-12, -10), (-6, 6), (-1, 0)


@pytest.mark.needs(lambda backend: backend.name == "numpy")
@pytest.mark.parametrize("split", ["contiguous", "zigzag"])
def test_keys_are_sent_no_more_often_than_brings_every_key_that_a_mask_leaves(split, rng, ranks):
    rows = 6
    for size, mask in itertools.product((1, 2, 3, 8), (*MASKS, *(window(*ends) for ends in ENDS))):
        count = size * rows
        places = shard_helpers.places(size, split, rows).reshape(size, rows)
        allowed = mask.to_array(count, count, xp=np)
        pairs = itertools.product(range(size), repeat=2)
        needed = {hop for rank, hop in pairs if allowed[np.ix_(places[rank], places[rank - hop])].any()}
        ways = itertools.product(range(size), range(1, size + 1))
        fewest = min(n - 1 + (first > 0) for first, n in ways if needed <= {(first + i) % size for i in range(n)})
        arrays = rng.standard_normal((3, 1, 1, count, 4))

        def step(group, arrays=arrays, mask=mask):
            shards = ac.Shards(group, split, "ring")
            parts = (ac.shard(x, shards) for x in arrays)
            return ac.scaled_dot_product_attention(*parts, mask=mask, shards=shards)

        ranks.lent.calls.clear()
        found = shard_helpers.in_order(ranks(size, step), -2, size, split)
        expected = ac.scaled_dot_product_attention(*arrays, mask=mask, implementation="dense")
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13, err_msg=f"{size} {mask}")
        assert ranks.lent.calls == ["rotate"] * fewest * size, (size, mask)


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


def test_small_scores_of_one_rank_are_not_those_of_others(put, get, ranks):
    """No maximum is subtracted from small scores; those of the next rank may overflow without one."""
    x = np.random.default_rng(0).standard_normal((1, 1, 32, 4)).astype(np.float32)
    key = x * np.where(np.arange(32)[:, None] < 8, np.float32(0.1), np.float32(1e3))
    options = {"implementation": "blockwise", "return_logsumexp": True}
    whole = ac.scaled_dot_product_attention(*map(put, (x, key, x)), **options)

    def step(group):
        shards = ac.Shards(group, "contiguous", "ring")
        return ac.scaled_dot_product_attention(
            *(ac.shard(put(y), shards) for y in (x, key, x)), **options, shards=shards
        )

    parts = ranks(4, step)
    for name, axis in (("output", -2), ("logsumexp", -1)):
        found = np.concatenate([get(getattr(part, name)) for part in parts], axis=axis)
        np.testing.assert_allclose(found, get(getattr(whole, name)), rtol=1e-5, atol=1e-6)


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
