"""A sequence that ranks share: the numbers of the whole, and its bits in reproducible arithmetic. Threads are ranks."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from call_table import NAMES, RULES, shows
from shard_helpers import EXACT, check_close, inputs, joined, of_rank, parts_of, whole

import attention_core as ac
from attention_core._attention.reproducible import bounds
from attention_core.backend import Tuning

pytestmark = pytest.mark.needs(lambda backend: backend.name in ("torch", "numpy"))  # numbers, and gradients


def compared(ranks, backend, put, name, way, hidden=False, **more):
    """Results of ranks, joined, and those of the whole."""
    size, split, strategy, length, heads = way
    more = {"put": put, "differentiate": backend.differentiates and strategy != "merge"} | more
    more |= {"length": length, "heads": heads}
    shards = {"split": split, "strategy": strategy, "length": length_of(strategy, length)}
    parts = ranks(size, lambda group: of_rank(backend, ac.Shards(group, **shards), name, hidden=hidden, **more))
    expected = whole(backend, name, **more)
    if strategy == "merge":  # all ranks have the whole
        for part in parts[1:]:
            check_close(part, parts[0], 0)
        return parts[0], expected
    return joined(parts, split, expected), expected


def length_of(strategy, length):
    """What is divided: the keys alone under "merge", and queries and keys, each by itself, if they differ."""
    return length if isinstance(length, int) else length[1] if strategy == "merge" else None


WAYS = [  # every third of which have all strategies: ranks, split, strategy, lengths of queries and keys, heads
    (2, "contiguous", "gather", 16, (4, 2)), (4, "zigzag", "gather", 13, (4, 2)), (3, "contiguous", "gather", 13, (4, 2)),
    (2, "zigzag", "heads", 13, (6, 3)), (4, "contiguous", "heads", 16, (8, 2)), (3, "zigzag", "heads", 13, (6, 3)),
    (3, "zigzag", "merge", 13, (4, 2)), (8, "contiguous", "merge", 13, (4, 2)), (4, "contiguous", "merge", 16, (4, 2)),
    (3, "zigzag", "ring", 13, (4, 2)), (2, "contiguous", "ring", 16, (4, 2)), (8, "contiguous", "ring", 13, (4, 2)),
    (8, "zigzag", "gather", 16, (4, 2)), (8, "contiguous", "heads", 16, (8, 1)), (4, "zigzag", "ring", 13, (4, 2)),
    (2, "zigzag", "gather", (8, 16), (4, 2)), (5, "zigzag", "heads", 20, (40, 8)), (4, "contiguous", "gather", 4, (4, 2)),
    (2, "zigzag", "heads", (16, 8), (4, 4)), (2, "contiguous", "gather", (16, 8), (4, 2)), (2, "zigzag", "heads", 20, (28, 7)),
    (2, "zigzag", "ring", (8, 16), (4, 2)), (4, "zigzag", "gather", 1, (4, 2)), (2, "contiguous", "ring", (16, 8), (4, 2)),
    (4, "zigzag", "merge", 5, (4, 2)), (4, "contiguous", "ring", 7, (4, 2)), (8, "zigzag", "merge", 9, (4, 2)),
    (2, "zigzag", "merge", (1, 29), (4, 2)), (3, "contiguous", "merge", (5, 29), (4, 2)), (4, "zigzag", "merge", (2, 21), (4, 2)),
    (8, "zigzag", "ring", 1, (4, 2)), (4, "contiguous", "merge", 3, (4, 2)), (4, "contiguous", "heads", 4, (8, 8)),
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_ranks_have_the_numbers_of_the_whole(backend, put, ranks, name):
    """Also of more ranks than positions; in half of the ways, what is hidden is not finite."""
    step = 9 if backend.differentiates and name in RULES else 3
    for number, way in enumerate(WAYS[NAMES.index(name) % step :: step]):
        hidden = number % 2 == 0 and not shows(name)
        check_close(*compared(ranks, backend, put, name, way, hidden))


SMALL = Tuning(queries=1, keys=4, min_queries=3, dense_below=0, structured_below=0, backward_keys=4, exact_scores=96)
SOME = ("causal", "lengths", "array", "bias of bhmn", "bias of mn", "sinks", "dropout", "score_mod with arrays", "function",
        "window", "segments of samples")  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_blocks_have_positions_that_are_no_neighbours(backend, put, ranks, monkeypatch, name):
    """Of several queries and keys, under rules that classify blocks, or pairs."""
    monkeypatch.setattr(backend, "tuning", SMALL)
    for length, implementation in ((24, "auto"), (23, "dense"), (23, "blockwise")):
        way = 3, "zigzag", "merge", length, (4, 2)
        check_close(*compared(ranks, backend, put, name, way, implementation=implementation))
    if name in EXACT and backend.differentiates:
        for strategy in ("gather", "merge"):
            check_close(*compared(ranks, backend, put, name, (3, "zigzag", strategy, 23, (4, 2)), **BITS), most=0)


BITS = {"arithmetic": "reproducible", "dtype": "float32"}
WAYS_OF_BITS = [
    (1, "zigzag", "gather", 13, (4, 2)), (2, "zigzag", "heads", 13, (4, 2)), (3, "zigzag", "gather", 13, (4, 2)),
    (8, "contiguous", "gather", 13, (4, 2)), (3, "contiguous", "merge", 13, (4, 2)), (4, "zigzag", "merge", 13, (4, 2)),
    (4, "zigzag", "gather", 13, (4, 2)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in EXACT), ("causal", "float16"), ("causal", ml_dtypes.bfloat16)]
)
@pytest.mark.needs("gradients")
def test_ranks_have_the_bits_of_the_whole(backend, put, ranks, monkeypatch, name, dtype):
    """In 16 bits all of them by exact sums, as no bound decides a number."""
    monkeypatch.setattr(bounds, "TINY", bounds.TINY if dtype == "float32" else math.inf)
    for turn, way in enumerate(WAYS_OF_BITS):
        if turn % 3 != EXACT.index(name) % 3 or dtype != "float32":
            more = BITS | {"dtype": dtype, "spread": (1.0, 8.0)[turn % 2]}
            check_close(*compared(ranks, backend, put, name, way, **more), most=0)


@pytest.mark.needs("gradients")
def test_sums_over_many_queries_of_ranks_are_exact(backend, put, ranks):
    check_close(
        *compared(ranks, backend, put, "none", (2, "contiguous", "gather", (2100, 4), (2, 1)), batch=1, **BITS), most=0
    )


@pytest.mark.parametrize("arithmetic", ["fast", "reproducible"])
@pytest.mark.parametrize(("batch", "heads"), [(0, (4, 4)), (2, (0, 0))])
def test_ranks_without_a_sample_or_a_head_have_the_empty_result(backend, put, ranks, batch, heads, arithmetic):
    for name, strategy, split in itertools.product(
        ("causal", "bias of bhmn", "sinks"), ("gather", "heads", "merge", "ring"), ("zigzag", "contiguous")
    ):
        if arithmetic == "fast" or (strategy != "ring" and name != "sinks"):
            more = BITS | {"batch": batch, "arithmetic": arithmetic}
            check_close(*compared(ranks, backend, put, name, (4, split, strategy, 16, heads), **more), most=0)


@pytest.mark.needs("gradients")
@pytest.mark.parametrize("argument", range(3))
@pytest.mark.parametrize(
    ("strategy", "arithmetic"),
    [*itertools.product(("gather", "heads", "merge"), ("fast", "reproducible")), ("ring", "fast")],
)
def test_a_nan_shows_in_what_attends_to_it_and_in_gradients_of_what_that_attends_to(
    backend, put, ranks, strategy, arithmetic, argument
):
    def spoil(arrays):
        arrays[argument][0, :, 9, 2] = np.nan
        return arrays

    more = {"change": spoil, **(BITS if arithmetic == "reproducible" else {})}
    for name, split in itertools.product(("causal", "window", "array"), ("contiguous", "zigzag")):
        found, expected = compared(ranks, backend, put, name, (2, split, strategy, 16, (4, 2)), **more)
        check_close(found, expected, *([0] if arithmetic == "reproducible" else []))
        assert np.isnan(expected["output"]).any()
        assert strategy == "merge" or np.isfinite(expected["value"][:, :, 12:]).any()


@pytest.mark.needs("numpy")
@pytest.mark.parametrize("strategy", ["gather", "heads", "ring", "merge"])
def test_no_rule_becomes_an_array_of_all_positions(backend, put, ranks, monkeypatch, strategy):
    monkeypatch.setattr(backend, "tuning", SMALL)
    wholes, asked = tuple(map(put, inputs((4, 4), length=64)[:3])), []

    def rule(batch, head, query, key):
        asked.append(query.size * key.size)
        return (query - key) % 3 < 2

    def of_shard(group):
        shards = ac.Shards(group, strategy=strategy)
        ac.scaled_dot_product_attention(*parts_of(wholes, shards), mask=ac.MaskFunction(rule), shards=shards)

    ranks(4, of_shard)
    assert max(asked) <= 64


@pytest.mark.needs("gradients")
def test_bfloat16_is_as_precise_on_8_ranks_as_on_one(backend, put, ranks):
    heads, bfloat16 = (8, 4), ml_dtypes.bfloat16

    def rounded(arrays):
        return [x.astype(bfloat16).astype(np.float64) for x in arrays]

    true = whole(backend, "causal", length=64, heads=heads, put=put, change=rounded)
    for strategy in ("gather", "heads", "ring"):
        found, one = compared(ranks, backend, put, "causal", (8, "zigzag", strategy, 64, heads), dtype=bfloat16)
        for name in ("output", "key", "value", "query"):
            errors = [np.sqrt(np.mean((x[name].astype(np.float64) - true[name]) ** 2)) for x in (found, one)]
            assert errors[0] <= 1.05 * errors[1], name


@pytest.mark.parametrize("split", ["contiguous", "zigzag"])
def test_unshard_is_the_inverse_of_shard(backend, put, get, ranks, split):
    for length, axis in ((13, -1), (16, -2), (3, -3)):
        x = put(np.random.default_rng(0).standard_normal((length, *(2,) * (-axis - 1))))

        def of_shard(group, x=x, length=length, axis=axis):
            with pytest.raises(ValueError):
                ac.shard(x, ac.Shards(group, split, length=length + 1), axis=axis)
            shards = ac.Shards(group, split, length=length)
            part = ac.shard(x, shards, axis=axis)
            at = get(ac.shard_positions(part, shards, axis=axis))
            return get(ac.unshard(part, shards, axis=axis)), get(part), at

        for found, part, at in ranks(4, of_shard):
            np.testing.assert_array_equal(found, get(x))
            np.testing.assert_array_equal(part[at < length], get(x)[at[at < length]])
            assert (part[at >= length] == 0).all()


@pytest.mark.needs("gradients")
def test_the_gradient_of_unshard_is_a_shard_of_the_sum(backend, put, get, ranks):
    x, weights = put(np.arange(13.0)), [put(np.random.default_rng(r).standard_normal(13)) for r in range(4)]

    def of_shard(group):
        shards, rank = ac.Shards(group, length=13), backend.collectives.rank(None)
        loss = lambda part: backend.namespace.sum(ac.unshard(part, shards, axis=-1) * weights[rank])  # noqa: E731
        part = ac.shard(x, shards, axis=-1)
        return get(backend.value_and_grad(loss)(part)[1][0]), get(ac.shard(sum(weights), shards, axis=-1))

    for found, expected in ranks(4, of_shard):
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-15)


def test_a_group_of_one_is_the_plain_call(backend, put, get, ranks):
    wholes = tuple(map(put, inputs()[:3]))
    (found,) = ranks(1, lambda group: get(ac.scaled_dot_product_attention(*wholes, shards=ac.Shards(group))))
    np.testing.assert_array_equal(found, get(ac.scaled_dot_product_attention(*wholes)))
    assert not ranks.lent.calls


@pytest.mark.parametrize(
    ("strategy", "taken", "arithmetic", "calls"),
    [("auto", "heads", "fast", {"exchange": 4}), ("gather", "gather", "fast", {"gather": 2}),
     ("merge", "merge", "fast", {"total": 1}), ("merge", "merge", "reproducible", {"largest": 2, "total": 2})],
)  # fmt: skip
def test_a_call_takes_the_strategy_that_is_told(put, ranks, strategy, taken, arithmetic, calls):
    wholes = [put(np.ones((1, 4, 16, width), np.float32)) for width in (4, 4, 3)]

    def of_shard(group):
        shards = ac.Shards(group, strategy=strategy)
        parts, options = parts_of(wholes, shards), {"shards": shards, "arithmetic": arithmetic}
        ac.scaled_dot_product_attention(*parts, **options)
        return ac.explain_attention(*parts, **options)

    told = ranks(2, of_shard)[0]
    assert Counter(ranks.lent.calls) == {name: 2 * count for name, count in calls.items()}
    assert told.chosen == taken
    assert len(told.candidates) == (0 if strategy == "merge" else 2)
    assert sum("another one was asked for" in each.slower for each in told.candidates) == (strategy != "merge")


def test_heads_are_taken_where_ranks_divide_them(put, ranks):
    def reasons(group, heads, **options):
        x = [put(np.zeros((1, count, 4, 3), np.float32)) for count in (heads[0], heads[1], heads[1])]
        return ac.explain_attention(*x, shards=ac.Shards(group), **options)

    for heads, options, first, last in (
        ((4, 4), {}, "gather: not taken", "another one was asked for or comes first"),
        ((4, 1), {}, "heads: not taken", "repeats key/value heads"),
        ((3, 3), {}, "heads: refused: 3 heads and 3 key/value heads", "not shared out evenly by 4 ranks"),
        ((4, 1), {"arithmetic": "reproducible"}, "heads: refused", "'gather' has equal bits"),
    ):
        told = ranks(4, lambda group, heads=heads, options=options: reasons(group, heads, **options))[0]
        assert any(line.strip().startswith(first) and line.endswith(last) for line in str(told).splitlines()), told


@dataclass(frozen=True, eq=False)
class Causalish(ac.Mask):
    """A rule of users without arrays."""

    def allowed(self, at, /, *, xp):
        return xp.less_equal(at.key, xp.add(at.query, at.head))


class OfDocuments(ac.Segments):
    """A rule of users that takes a block for neighbours."""

    def allowed(self, at, /, *, xp):
        return super().allowed(at, xp=xp)

    def blocks(self, query, key, /, *, xp):
        return super().blocks(query, key, xp=xp)


def attended(put, get, ranks, mask, way, **options):
    """Outputs of ranks, and that of the whole."""
    size, split, strategy, length, heads = way
    wholes = tuple(map(put, inputs(heads, length)[:3]))

    def of_shard(group):
        shards = ac.Shards(group, split, strategy)
        return get(ac.scaled_dot_product_attention(*parts_of(wholes, shards), mask=mask, shards=shards, **options))

    return ranks(size, of_shard), get(ac.scaled_dot_product_attention(*wholes, mask=mask))


def test_a_rule_of_users_classifies_no_block_of_positions_that_are_no_neighbours(put, get, ranks, monkeypatch, backend):
    monkeypatch.setattr(backend, "tuning", SMALL)
    ids = put(np.random.default_rng(0).integers(0, 3, (2, 24)).astype(np.int32))
    parts, expected = attended(put, get, ranks, OfDocuments(ids, ids), (3, "zigzag", "merge", 24, (4, 2)))
    for found in parts:
        np.testing.assert_allclose(found, expected, rtol=1e-11)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("strategy", ["auto", "gather", "heads"])
def test_a_rule_of_users_has_the_heads_of_the_whole_next_to_an_array(put, get, ranks, strategy, implementation):
    mask = Causalish() & put(np.random.default_rng(0).random((4, 1, 16)) < 0.8)
    parts, expected = attended(
        put, get, ranks, mask, (2, "contiguous", strategy, 16, (4, 4)), implementation=implementation
    )
    np.testing.assert_allclose(np.concatenate(parts, axis=-2), expected, rtol=1e-11)
