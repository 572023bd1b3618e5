"""Masks: what they allow, what they know of blocks, and how other conventions come in."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

import attention_core as ac
from attention_core.backend import rule_of
from attention_core.masks import Given, Spans, is_top_left_causal

M, N = 5, 7
I, J = np.arange(M)[:, None], np.arange(N)[None, :]  # noqa: E741

RULES = {
    "causal": (ac.Causal(), J <= I),
    "causal later": (ac.Causal(offset=2), J <= I + 2),
    "causal earlier": (ac.Causal(offset=-2), J <= I - 2),
    "window": (ac.SlidingWindow(left=1, right=2), (J >= I - 1) & (J <= I + 2)),
    "window left": (ac.SlidingWindow(left=2), J >= I - 2),
    "window right": (ac.SlidingWindow(right=0), J <= I),
    "window offset": (ac.SlidingWindow(left=0, right=1, offset=3), (J >= I + 3) & (J <= I + 4)),
    "window without limits": (ac.SlidingWindow(), np.ones((M, N), dtype=bool)),
    "lengths": (ac.KeyLengths(3), np.broadcast_to(J < 3, (M, N))),
    "no keys": (ac.KeyLengths(0), np.zeros((M, N), dtype=bool)),
    "and": (ac.Causal(offset=1) & ac.SlidingWindow(left=1), (J <= I + 1) & (J >= I - 1)),
    "both lengths": (ac.KeyLengths(3) & ac.KeyLengths(5), np.broadcast_to(J < 3, (M, N))),
    "or": (ac.Causal(offset=-1) | ac.KeyLengths(2), (J <= I - 1) | (J < 2)),
    "not": (~ac.Causal(), J > I),
    "nested": (~(ac.Causal() & ~ac.KeyLengths(1)), ~((J <= I) & (J >= 1))),
}


def dense(rule, put, get, xp):
    array = rule.to_array(M, N, num_heads=1, leading=(2,), like=put(np.zeros(1)), xp=xp)
    return np.broadcast_to(get(array), (2, 1, M, N))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_allows_what_its_formula_says(name, put, get, xp):
    rule, expected = RULES[name]
    np.testing.assert_array_equal(dense(rule, put, get, xp), np.broadcast_to(expected, (2, 1, M, N)))


@pytest.mark.parametrize("way", ["auto", "dense", "blockwise"])
def test_masks_that_small_calls_keep_are_not_confused(way, backend, put, get, rng):
    """Of which some have one signature, or one code."""
    query, key, value = (put(rng.standard_normal((1, 1, rows, 4))) for rows in (M, N, N))
    rules = [rule for rule, _ in RULES.values()] + [ac.Causal(offset=offset) for offset in range(-10, 3)]
    rules += [ac.SlidingWindow(left=left, offset=offset) for left in range(9) for offset in range(9)]
    ends = [(2, 0), (0, 3), (9, 9), (None, 1)]
    rules += [ac.SlidingWindow(left=left, right=right, offset=offset) for left, right in ends for offset in (-6, 0, 6)]
    functions = [ac.MaskFunction(lambda batch, head, query, key, limit=limit: key < limit) for limit in (1, 3, 5)]
    trees = [tree for rule in rules[-25:] for tree in (ac.Causal() & rule, ac.Causal(offset=-9) | rule)]
    if backend.loops.traced and way != "auto":  # where each is a program
        rules, trees = [], []
    for _ in range(2):
        for rule in (*rules, *functions, *trees):
            allowed = put(rule.to_array(M, N, xp=np))
            found = get(ac.scaled_dot_product_attention(query, key, value, mask=rule, implementation=way))
            expected = get(ac.scaled_dot_product_attention(query, key, value, mask=allowed))
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_what_a_rule_allows_is_within_its_band(name, get, xp):
    """All of it, where the band is exact; and that of a window is no wider than the window."""
    rule, expected = RULES[name]
    band = rule.bounds().numbers()[0]
    distance = np.broadcast_to(J - I, (M, N))
    within = (band.low <= distance) & (distance <= band.high) & (band.stop > J)
    allowed = np.broadcast_to(expected, (M, N))
    assert (within >= allowed).all()
    assert not band.is_exact or (within == allowed).all()
    narrow = {"window": (-1, 2), "window offset": (3, 4), "and": (-1, 1), "causal": (None, 0)}
    assert band.ends == narrow.get(name, band.ends)
    assert band.stop == 3 or name != "both lengths"
    assert band.is_exact or name not in narrow
    again = rule_of(band)
    assert again is None or (get(again.to_array(M, N, xp=xp)) == within).all()


def test_two_arrays_for_one_bound_are_no_exact_band(put):
    first, second = (put(np.asarray(each)) for each in ([1, 4], [3, 2]))
    for rule in (ac.KeyLengths(first) & ac.KeyLengths(second), ac.Causal(offset=first) & ac.Causal(offset=second)):
        assert not any(band.is_exact for band in rule.bounds().numbers((2,)))


class Even(ac.masks.Mask):
    """Even keys up to the query. Its bounds are those of `Causal`, and it says no more of them."""

    def allowed(self, at, /, *, xp):
        return xp.logical_and(at.key <= at.query, xp.equal(xp.remainder(at.key, 2), 0))

    def bounds(self):
        return ac.Causal().bounds()._replace(is_exact=False)


class Odd:
    """What a rule is mixed with: odd keys."""

    def allowed(self, at, /, *, xp):
        return xp.equal(xp.remainder(at.key + 0 * at.query, 2), 1)


class OddCausal(Odd, ac.Causal):
    """Odd keys, of which the bounds of `Causal` are not."""


class LaterInLaterEntries(ac.Causal):
    """A rule about more than distance, with blocks of its own."""

    def allowed(self, at, /, *, xp):
        return xp.logical_and(super().allowed(at, xp=xp), xp.greater_equal(at.key, at.batch))

    def blocks(self, query, key, /, *, xp):
        some, every = super().blocks(query, key, xp=xp)
        return some, xp.zeros_like(every)


def even_sums(rule):
    """A rule derived from the one that is given: pairs whose sum is even."""

    class EvenSums(type(rule)):
        def allowed(self, at, /, *, xp):
            return xp.logical_and(super().allowed(at, xp=xp), xp.equal(xp.remainder(at.query + at.key, 2), 0))

    return EvenSums(**vars(rule))


EVEN = (I + J) % 2 == 0
DERIVED = {
    "bounds": (lambda put: Even(), (J <= I) & (J % 2 == 0)),
    "causal": (lambda put: even_sums(ac.Causal()), (J <= I) & EVEN),
    "offset": (lambda put: even_sums(ac.Causal(offset=6)), EVEN),  # all pairs, which its blocks would say
    "window": (lambda put: even_sums(ac.SlidingWindow(left=3, right=1)), (J >= I - 3) & (J <= I + 1) & EVEN),
    "lengths": (lambda put: even_sums(ac.KeyLengths(2)), (J < 2) & EVEN),
    "segments": (lambda put: even_sums(ac.Segments(put(np.zeros(M, int)), put(np.zeros(N, int)))), EVEN),
    "blocks": (lambda put: LaterInLaterEntries(), (J <= I) & (np.arange(2)[:, None, None, None] <= J)),
    "mixed": (lambda put: OddCausal(), np.broadcast_to(J % 2 == 1, (M, N))),
    "behind one that allows more": (lambda put: ac.Causal() | (ac.Causal() & ac.MaskFunction(LOOKING["head"])), J <= I),
}


@pytest.mark.parametrize("implementation", ["auto", "dense", "blockwise"])
@pytest.mark.parametrize("name", DERIVED)
def test_a_derived_rule_is_what_it_allows_and_not_its_base(name, implementation, backend, put, get, rng, monkeypatch):
    """Nor are its bounds, and what the whole tree allows is bounds alone."""
    monkeypatch.setattr(backend, "tuning", backend.tuning._replace(min_queries=2, keys=3))
    query, key, value = (put(rng.standard_normal((2, 3, rows, 4))) for rows in (M, N, N))
    make, allowed = DERIVED[name]
    found = ac.scaled_dot_product_attention(query, key, value, mask=make(put), implementation=implementation)
    expected = ac.scaled_dot_product_attention(query, key, value, mask=put(allowed), implementation="dense")
    np.testing.assert_allclose(get(found), get(expected), rtol=0, atol=1e-6)


def test_arrays_of_numpy_that_change_in_place_are_read_as_they_are_now():
    lengths = np.asarray([2, 3])
    rule = ac.KeyLengths(lengths)
    lengths += 2
    np.testing.assert_array_equal(rule.to_array(1, N, xp=np), ac.KeyLengths(np.asarray([4, 5])).to_array(1, N, xp=np))
    with pytest.raises(ValueError):
        ac.KeyLengths(np.asarray([-(2**40), 2]))


def test_rules_may_differ_along_the_leading_axes(put, get, xp):
    per_sample = np.array([1, 3])
    shown = per_sample[:, None, None, None]
    for rule, expected in (
        (ac.KeyLengths(put(per_sample)), shown > J),
        (ac.Causal(offset=put(per_sample)), I + shown >= J),
        (ac.SlidingWindow(left=1, right=0, offset=put(per_sample)), (I + shown >= J) & (I + shown - 1 <= J)),
    ):
        np.testing.assert_array_equal(dense(rule, put, get, xp), np.broadcast_to(expected, (2, 1, M, N)))


@pytest.mark.parametrize("far", [2**31 - 1, 2**31, 2**40, 10**30])
def test_far_is_far(far, put, get, xp):
    """Numbers beyond the type of positions mean what they say."""
    everything = [ac.Causal(offset=far), ac.SlidingWindow(left=far, right=far), ac.KeyLengths(far)]
    if far < 2**62:
        arrays = put(np.array([far, far]))
        everything += [ac.Causal(offset=arrays), ac.KeyLengths(arrays)]
    for rule in everything:
        assert dense(rule, put, get, xp).all()
    assert not dense(ac.Causal(offset=-far), put, get, xp).any()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "int64"])
def test_lengths_and_segments_may_be_of_any_integer_type(dtype, put, get, xp):
    lengths, ids = put(np.array([2, 5], dtype=dtype)), np.array([0, 0, 1, 1, 2], dtype=dtype)
    np.testing.assert_array_equal(dense(ac.KeyLengths(lengths), put, get, xp)[:, 0, 0].sum(-1), [2, 5])
    rule = ac.Segments(put(ids), put(np.arange(7).astype(dtype)))
    np.testing.assert_array_equal(dense(rule, put, get, xp)[0, 0], ids[:, None] == np.arange(7)[None, :])


def test_numpy_leaves_the_operator_to_the_rule():
    array = np.ones((M, N), dtype=bool)
    assert isinstance((array & ac.Causal()).second, Given)
    assert isinstance((array | ac.Causal()).second, Given)


def spans(length, size, put, axis):
    first = np.arange(0, length, size, dtype=np.int32)
    last = np.minimum(first + size - 1, length - 1).astype(np.int32)
    return Spans(*(put(np.expand_dims(each, axis) if axis else each) for each in (first, last)), size)


def classified(rule, rows, columns, put, get, xp):
    """Whether something and whether everything is allowed in blocks of the array size, as the rule knows."""
    return list(map(get, rule.blocks(spans(M, rows, put, 1), spans(N, columns, put, 0), xp=xp)))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 3), (3, 2), (5, 7), (4, 4)])
def test_a_block_is_classified_as_its_content(name, rows, columns, put, get, xp):
    rule, allowed = RULES[name]
    some, every = (
        np.broadcast_to(each, (-(-M // rows), -(-N // columns)))
        for each in classified(rule, rows, columns, put, get, xp)
    )
    for i, j in itertools.product(range(some.shape[0]), range(some.shape[1])):
        content = allowed[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        assert some[i, j] or not content.any()
        assert not every[i, j] or content.all()
        if name not in ("and", "or", "nested"):  # of which no block is left undecided that is empty or full
            assert some[i, j] == content.any() or name.startswith("window")
            assert every[i, j] == content.all()


def test_arrays_classify_blocks_for_each_sample(put, get, xp):
    some, every = classified(ac.KeyLengths(put(np.array([2, 5]))), 5, 2, put, get, xp)
    np.testing.assert_array_equal(some[:, 0, 0], [[True, False, False, False], [True, True, True, False]])
    np.testing.assert_array_equal(every[:, 0, 0], [[True, False, False, False], [True, True, False, False]])


def test_conventions_come_in_by_name(put, get):
    keep = np.array([[True, True, False], [True, False, False]])
    np.testing.assert_array_equal(get(ac.masks.mask_from_ignore(put(~keep))), keep)
    np.testing.assert_array_equal(get(ac.masks.mask_from_integers(put(keep.astype(np.int64)))), keep)
    for ignored in (-10000.0, -np.inf, -3e38):
        np.testing.assert_array_equal(get(ac.masks.mask_from_additive(put(np.where(keep, 0.0, ignored)))), keep)
    np.testing.assert_array_equal(
        get(ac.masks.mask_from_additive(put(np.array([-2.0, 0.0])), threshold=-1.0)), [False, True]
    )
    np.testing.assert_array_equal(get(ac.masks.mask_from_additive(put(np.array([0.0, -1e4])))), [True, False])
    np.testing.assert_array_equal(get(ac.masks.mask_from_padding(put(keep))), keep[:, None, None, :])


def test_only_a_causal_mask_without_offset_is_top_left_causal(xp):
    rule = ac.Causal()
    others = (ac.Causal(offset=1), ac.Causal(offset=xp.asarray(0)), ~rule, ac.SlidingWindow(left=9, right=0), None)
    assert all(map(is_top_left_causal, (rule, rule & rule, ac.SlidingWindow(right=0))))
    assert not any(map(is_top_left_causal, others))


LOOKING = {
    "head": lambda b, h, q, k: k <= q + h,
    "batch": lambda b, h, q, k: k <= q + b,
    "both": lambda b, h, q, k: (k + h) <= (q + b),
}


def test_a_rule_of_users_has_no_array_of_heads():
    with pytest.raises(TypeError):
        type("OfTable", (Even,), {"axes": {"table": 3}})


@dataclass(frozen=True, eq=False)
class ByHead(ac.masks.Mask):
    """A rule of a user that looks at heads."""

    def allowed(self, at, /, *, xp):
        return xp.less_equal(at.key, xp.add(at.query, at.head))


@pytest.mark.parametrize("name", [*LOOKING, "derived"])
def test_a_rule_of_batch_or_head_is_no_array_of_pairs(name, put, get, xp):
    """It is refused, alone or combined, unless both are counted; then it is the mask that attention uses."""
    rule = ByHead() if name == "derived" else ac.MaskFunction(LOOKING[name])
    for mask in (rule, ac.Causal() & rule, ~rule | ac.KeyLengths(2)):
        with pytest.raises(ValueError):
            mask.to_array(M, N, xp=xp)
        q, k = put([np.ones((2, 3, size, 4)) for size in (M, N)])
        array = mask.to_array(M, N, num_heads=3, leading=(2,), like=q, xp=xp)
        results = (ac.scaled_dot_product_attention(q, k, k, mask=each, return_weights=True) for each in (mask, array))
        np.testing.assert_array_equal(*(get(result.weights) for result in results))


def test_numbers_on_an_accelerator_are_not_read(put, get, monkeypatch):
    """As the host would wait for it: what is no mask there is no error."""
    mask = put(np.asarray([0.0, 5.0, -np.inf], "float32"))
    with pytest.raises(ValueError):
        ac.masks.mask_from_additive(mask)
    monkeypatch.setattr("attention_core._backend._find.is_on_host", lambda array: False)
    assert get(ac.masks.mask_from_additive(mask)).tolist() == [True, True, False]
