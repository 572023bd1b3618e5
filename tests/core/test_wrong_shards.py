"""Calls with shards that are wrong, or not the same on all ranks, and what each is told. Threads are ranks."""

import functools
from dataclasses import dataclass

import numpy as np
import pytest
from call_table import quadratic
from shard_helpers import inputs

import attention_core as ac
from attention_conformance import check_same_call

pytestmark = pytest.mark.needs(lambda backend: backend.name in ("torch", "numpy"))


def wrong_calls(put):
    """Calls of the shard of rank r out of 2, and what each is told."""
    x = put(np.zeros((2, 4, 6, 3), np.float32))
    odd, three = x[..., :5, :], x[:, :3, ...]
    ids, allowed = put(np.zeros((2, 6), np.int32)), put(np.ones((6, 6), np.bool_))
    exact = {"arithmetic": "reproducible"}
    for array, options, settings, kind, text in (
        (x, {}, {"group": 3}, TypeError, "expected the group of shards as a barrier; got int"),
        (x, {}, {"split": "ring"}, ValueError, "expected a split of shards out of contiguous, zigzag; got 'ring'"),
        (x, {}, {"split": (((0, 1, 12),),)}, ValueError, "expected a split of shards out of contiguous, zigzag; got tuple"),
        (x, {}, {"strategy": "tree"}, ValueError, "expected a strategy of shards out of auto, gather, heads, merge, ring; got 'tree'"),
        (odd, {}, {}, ValueError, "expected query with 6 positions on each of 2 ranks, of length 10 under the zigzag split; got 5"),
        (x, {}, {"length": 13}, ValueError, "expected query with 8 positions on each of 2 ranks, of length 13 under the zigzag split; got 6"),
        (x, {}, {"length": 0}, ValueError, "expected the length of shards"),
        (three, {}, {"strategy": "heads"}, ValueError, "3 heads and 3 key/value heads are not shared out"),
        (x, {"mask": allowed}, {}, ValueError, "expected mask"),
        (x, {"mask": ac.Segments(ids, ids)}, {}, ValueError, "expected"),
        (x, {"bias": put(np.zeros((6, 6), np.float32))}, {}, ValueError, "expected bias"),
        (x, {"implementation": "fused"}, {}, ValueError, "out of auto, dense, blockwise with shards"),
        (x, {"return_weights": True}, {}, ValueError, "expected no return_weights with shards"),
        (x, exact, {"strategy": "ring"}, ValueError, "'gather' has equal bits"),
        (x, {"implementation": "dense"}, {"strategy": "ring"}, ValueError, "a ring has the keys of one rank"),
    ):  # fmt: skip
        yield (array, array, array), options, settings, kind, text
    yield (x, x[:, :1, ...], x[:, :1, ...]), exact, {"strategy": "heads"}, ValueError, "would be repeated"


def test_wrong_calls_are_told_on_every_rank_before_any_collective(put, ranks):
    for arrays, options, settings, kind, text in wrong_calls(put):

        def call(group, arrays=arrays, options=options, settings=settings, kind=kind):
            shards = ac.Shards(**{"group": group} | settings)
            with pytest.raises(kind) as caught:
                ac.scaled_dot_product_attention(*arrays, shards=shards, **options)
            return str(caught.value)

        first, second = ranks(2, call)
        assert first == second
        assert text in first
        assert not ranks.lent.calls


def functions_that_differ(put):
    """Pairs of functions of scores with one name: bodies, nested bodies, names, defaults, closures, and an object's."""
    yield (lambda s, b, h, q, k: s + 1.0), (lambda s, b, h, q, k: s - 1.0)
    yield (lambda s, b, h, q, k: s + 1.0), (lambda s, b, h, q, k: s + 2.0)
    yield (lambda s, b, h, q, k: (lambda: s + 1.0)()), (lambda s, b, h, q, k: (lambda: s + 2.0)())
    yield (lambda s, b, h, q, k: s + q.ndim), (lambda s, b, h, q, k: s + q.size)
    for one, other in (
        (1.0, 2.0),
        (put(np.zeros(3)), put(np.asarray([0.0, 0.0, 1.0]))),
        ([1], [2]),
        ({"a": 1}, {"b": 1}),
    ):
        yield closing_over(one), closing_over(other)
        yield with_default(one), with_default(other)
    yield functools.partial(with_rate, rate=1.0), functools.partial(with_rate, rate=2.0)
    yield Rate(1.0), Rate(2.0)


def closing_over(value):
    return lambda s, b, h, q, k: (value, s)[1]


def with_default(value):
    return lambda s, b, h, q, k, x=value: (x, s)[1]


def with_rate(s, b, h, q, k, rate):
    return s * rate


class Rate:
    """A function that is an object."""

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, s, b, h, q, k):
        return s * self.rate


def rule_of_users(count):
    """A class of one name, and another rule."""
    allowed = (lambda self, at, /, *, xp: at.query >= at.key), (lambda self, at, /, *, xp: at.query > at.key)
    return dataclass(frozen=True, eq=False)(type("Rule", (ac.Mask,), {"allowed": allowed[count]}))


def calls_that_differ(put):
    """The name of an argument, and what it is on most ranks and on one, as options of a call or of shards."""
    rng = np.random.default_rng(0)
    allowed = [rng.random((24, 24)) < share for share in (0.5, 0.6)]
    lengths = [np.asarray([9, count]) for count in (7, 8)]
    yield "query", {}, {"query": (2, 4, 7, 3)}
    yield "value", {}, {"value": (2, 4, 8, 5)}
    yield "mask", {"mask": ac.Causal()}, {"mask": ac.SlidingWindow(left=3, right=0)}
    yield "mask", *({"mask": ac.Causal() & ac.KeyLengths(put(each))} for each in lengths)
    yield "mask", *({"mask": put(each)} for each in allowed)
    yield "bias", {}, {"bias": put(np.zeros((8, 24)))}
    yield "dropout", {"dropout": ac.Dropout(0.5, 3)}, {"dropout": ac.Dropout(0.5, 4)}
    yield "score_mod", {"score_mod": quadratic}, {"score_mod": ac.scores.alibi(4)}
    for usual, odd in functions_that_differ(put):
        yield "score_mod", {"score_mod": usual}, {"score_mod": odd}
    yield "score_mod", *({"score_mod": ac.scores.ScoreMod(each)} for each in next(functions_that_differ(put)))
    yield "mask", *({"mask": ac.MaskFunction(lambda b, h, q, k, n=n: q + n >= k)} for n in (0, 1))
    yield "mask", *({"mask": kind()} for kind in (rule_of_users(0), rule_of_users(1)))
    yield "is_causal", {}, {"is_causal": True}
    yield "scale", {"scale": 0.5}, {"scale": 0.25}
    yield "return_logsumexp", {}, {"return_logsumexp": True}
    yield "shards", {}, {"strategy": "ring"}
    yield "shards", {"split": "zigzag"}, {"split": "contiguous"}


def test_verified_calls_that_differ_are_told_on_every_rank_by_argument_and_rank(backend, put, ranks):
    for name, usual, odd in calls_that_differ(put):
        for wrong in (0, 2):

            def call(group, usual=usual, odd=odd, wrong=wrong):
                options = dict(odd if backend.collectives.local.rank == wrong else usual)
                shapes = [options.pop(each, (2, 4, 8, 3)) for each in ("query", "key", "value")]
                settings = {each: options.pop(each) for each in ("strategy", "split") if each in options}
                shards = ac.Shards(group, **settings)
                with pytest.raises(ValueError) as caught:
                    check_same_call(shards, *(put(np.zeros(shape)) for shape in shapes), **options)
                return str(caught.value)

            expected = f"expected the same {name} on all ranks of shards; got another on rank {wrong}"
            ranks.lent.calls.clear()
            assert ranks(3, call) == [expected] * 3
            assert ranks.lent.calls == ["gather"] * 3


def test_calls_that_agree_are_the_same(put, ranks):
    """Each rank makes its functions, which close over what holds itself, a module and a type."""
    wholes, bias = tuple(map(put, inputs(length=13)[:3])), put(np.random.default_rng(0).standard_normal((13, 13)))

    def call(group):
        box = [np, np.float32]
        box.append(box)
        score_mod = closing_over((box, len, frozenset(("a", "b")), with_default(0.5)))
        options = {
            "mask": ac.MaskFunction(lambda batch, head, query, key: key <= query),
            "dropout": ac.Dropout(0.4, 11),
            "score_mod": score_mod,
        }
        shards = ac.Shards(group, length=13)
        parts, rows = [ac.shard(x, shards) for x in wholes], ac.shard(bias, shards)
        return check_same_call(shards, *parts, **options, bias=rows)

    assert ranks(3, call) == [None] * 3


def test_what_is_no_shards_and_a_library_without_collectives_are_named(backend, put, monkeypatch):
    x = put(np.zeros((1, 2, 3, 4)))
    with pytest.raises(TypeError):
        ac.scaled_dot_product_attention(x, x, x, shards="group")
    monkeypatch.setattr(backend, "collectives", None, raising=False)
    with pytest.raises(TypeError):
        ac.scaled_dot_product_attention(x, x, x, shards=ac.Shards("group"))
