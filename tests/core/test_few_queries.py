"""A few queries against many keys, as in a cache: equal to the definition under the same mask as an array."""

import importlib

import numpy as np
import pytest
from pairwise import pairwise

import attention_core as ac
from attention_core._attention import memo
from attention_core.backend import get_backend
from attention_core.masks import And, Or
from attention_core.masks._rules import rule_of
from attention_core.scores import alibi

attention = ac.scaled_dot_product_attention
NUMPY = get_backend("numpy").namespace
B, H, G, D, E = 3, 6, 2, 5, 4
SIZES = [(1, 70), (2, 130), (5, 330), (33, 70)]

MASKS = {
    "length": lambda put, rows, columns: ac.KeyLengths(columns // 2),
    "length of all": lambda put, rows, columns: ac.KeyLengths(columns + 5),
    "lengths": lambda put, rows, columns: ac.KeyLengths(put(np.asarray([columns // 3, columns, columns // 2]))),
    "lengths with none": lambda put, rows, columns: ac.KeyLengths(put(np.asarray([0, columns + 3, 17]))),
    "equal lengths": lambda put, rows, columns: ac.KeyLengths(put(np.full(B, 40))),
    "one length of all": lambda put, rows, columns: ac.KeyLengths(put(np.asarray(41))),
    "no keys": lambda put, rows, columns: ac.KeyLengths(0),
    "offset": lambda put, rows, columns: ac.Causal(offset=columns - rows - 7),
    "offset to the end": lambda put, rows, columns: ac.Causal(offset=columns - rows),
    "negative offset": lambda put, rows, columns: ac.Causal(offset=-1),
    "offset before all keys": lambda put, rows, columns: ac.Causal(offset=-2),
    "one offset of all": lambda put, rows, columns: ac.Causal(offset=put(np.asarray(0))),
    "one negative offset of all": lambda put, rows, columns: ac.Causal(offset=put(np.asarray(-2))),
    "offsets": lambda put, rows, columns: ac.Causal(offset=put(np.asarray([0, 20, columns - rows]))),
    "window": lambda put, rows, columns: ac.SlidingWindow(left=12, right=0, offset=columns - rows),
    "window to the right": lambda put, rows, columns: ac.SlidingWindow(right=3, offset=30),
    "windows": lambda put, rows, columns: ac.SlidingWindow(left=12, offset=put(np.asarray([0, 20, columns - rows]))),
    "cache": lambda put, rows, columns: And(
        ac.Causal(offset=put(np.asarray([5, 20, 30]))), ac.KeyLengths(put(np.asarray([6, 50, 32])))
    ),
    "prompts before an empty cache": lambda put, rows, columns: And(
        ac.KeyLengths(put(np.asarray([rows, max(1, rows - 2), rows]))), ac.Causal(offset=put(np.zeros(B, int)))
    ),
    "prompts of one length": lambda put, rows, columns: And(
        ac.Causal(offset=put(np.zeros(B, int))), ac.KeyLengths(put(np.full(B, rows)))
    ),
    "either": lambda put, rows, columns: Or(ac.Causal(offset=9), ac.KeyLengths(put(np.asarray([3, 50, 0])))),
    "not": lambda put, rows, columns: ~ac.KeyLengths(columns - 9),
    "rule and array": lambda put, rows, columns: ac.KeyLengths(50) & put(np.arange(columns) % 3 > 0),
}


def as_array(mask, rows, columns):
    """The mask of all scores, on NumPy."""
    counts = np.ix_(*(np.arange(count, dtype=np.int32) for count in (B, H, rows, columns)))
    return np.broadcast_to(mask.allowed(ac.masks.Positions(*counts), xp=NUMPY), (B, 1, rows, columns))


def inputs(rng, rows, columns, width=E):
    shapes = (B, H, rows, D), (B, G, columns, D), (B, G, columns, width)
    return [rng.standard_normal(shape) for shape in shapes]


@pytest.mark.needs(lambda sizes, backend: not backend.loops.traced or sizes in ((2, 130), (33, 70)))
@pairwise(name=MASKS, sizes=SIZES, width=[D, E], implementation=["auto", "dense", "blockwise"], has_sinks=[False, True])
def test_a_rule_is_its_array(name, sizes, width, implementation, has_sinks, backend, put, get, rng):
    rows, columns = sizes
    arrays = inputs(rng, rows, columns, width)
    allowed = as_array(MASKS[name](np.asarray, rows, columns), rows, columns)
    options = {"sinks": rng.standard_normal(H)} if has_sinks else {}
    expected = attention(*arrays, mask=allowed, implementation="dense", return_logsumexp=True, **options)
    arrays, options = put((arrays, options))
    options |= {"mask": MASKS[name](put, rows, columns), "implementation": implementation}
    found = attention(*arrays, return_logsumexp=True, **options)
    np.testing.assert_allclose(get(found.output), expected.output, rtol=0, atol=1e-13)
    np.testing.assert_allclose(get(found.logsumexp), expected.logsumexp, rtol=0, atol=1e-13)
    if not backend.loops.traced:  # where this is another program
        np.testing.assert_array_equal(get(attention(*arrays, **options)), get(found.output))


LENGTHS = [
    [40, 40, 40],
    [40, 40, 40],
    [99, 99, 99],
    [3, 130, 40],
    [3, 130, 40],
    [40, 40, 40],
    [200, 200, 200],
    [0, 7, 0],
]


@pytest.mark.parametrize(
    "rule", [ac.KeyLengths, lambda at: ac.Causal(offset=at), lambda at: ac.SlidingWindow(left=20, right=0, offset=at)]
)
def test_lengths_are_read_in_every_call(rule, backend, put, get, rng, monkeypatch):
    """What they decide is kept for calls with the same ones, and for no other."""
    rows, columns, made, planned = 2, 132, [], []
    monkeypatch.setattr(memo, "rule_of", lambda *arguments: made.append(1) or rule_of(*arguments))

    def output(*arguments, **options):
        planned.append(memo.output_of(*arguments, **options))
        return planned[-1]

    monkeypatch.setattr("attention_core._functions.attention.output_of", output)
    plain = inputs(rng, rows, columns, D)
    expected = [
        attention(*plain, mask=as_array(rule(np.asarray(numbers)), rows, columns), implementation="dense")
        for numbers in LENGTHS
    ]
    made.clear()
    arrays = put(plain)
    for numbers, output_of_array in zip(LENGTHS, expected, strict=True):
        mask = rule(put(np.asarray(numbers)))
        np.testing.assert_allclose(get(attention(*arrays, mask=mask)), output_of_array, rtol=0, atol=1e-13)
        if numbers in ([40] * B, [99] * B) and not backend.loops.traced:
            assert planned[-1] is not None
    assert len(made) == (0 if backend.loops.traced else 4)  # of shared lengths that are not those of the last call


@pytest.mark.needs(lambda sizes, backend: not backend.loops.traced or sizes == (33, 70))
@pytest.mark.parametrize(("sizes", "dtype"), [((1, 130), "int64"), ((8, 8), "int32"), ((33, 70), "int32")])
def test_offsets_beyond_all_positions_hide_all_or_nothing(sizes, dtype, put, get, rng):
    arrays = put(inputs(rng, *sizes, D))
    whole, nothing = get(attention(*arrays)), np.zeros((B, H, sizes[0], D))
    for at, window, causal in ((2**31 - 1, nothing, whole), (2**31 - 5, nothing, whole), (-(2**31), whole, nothing)):
        offset = put(np.full(B, at, dtype=dtype))
        for mask, expected in (
            (ac.Causal(offset=offset), causal),
            (ac.SlidingWindow(left=5, offset=offset), window),
            (ac.SlidingWindow(right=5, offset=offset), causal),
        ):
            for implementation in ("auto", "dense", "blockwise"):
                found = get(attention(*arrays, mask=mask, implementation=implementation))
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


@pytest.mark.needs("numpy")
def test_lengths_that_are_written_over_are_read(rng):
    arrays = [rng.standard_normal(dims) for dims in ((B, H, 1, D), (B, G, 300, D), (B, G, 300, D))]
    first, second = (np.asarray(numbers) for numbers in ([50, 50, 50], [70, 90, 300]))
    for lengths in (first, second, first, second):
        expected = attention(*arrays, mask=ac.KeyLengths(lengths.copy()), implementation="dense")
        np.testing.assert_allclose(attention(*arrays, mask=ac.KeyLengths(lengths)), expected, rtol=0, atol=1e-13)
        first += 1
        second[:] = 60


@pytest.mark.parametrize("name", ["length", "offset", "window", "windows", "cache"])
def test_positions_are_those_of_all_keys(name, put, get, rng):
    """Bias, score modification and dropout know which keys were left."""
    rows, columns = 2, 130
    arrays, mask = inputs(rng, rows, columns), MASKS[name](put, rows, columns)
    allowed = as_array(MASKS[name](np.asarray, rows, columns), rows, columns)
    for options in (
        {"bias": rng.standard_normal((H, rows, columns))},
        {"bias": rng.standard_normal((rows, 1))},
        {"score_mod": alibi(H), "softcap": 2.0},
        {"dropout": ac.Dropout(0.4, 3)},
    ):
        expected = attention(*arrays, mask=allowed, implementation="dense", **options)
        placed = {key: put(each) if key == "bias" else each for key, each in options.items()}
        found = attention(*put(arrays), mask=mask, **placed)
        np.testing.assert_allclose(get(found), expected, rtol=0, atol=1e-13)


@pytest.mark.needs("jax")
def test_the_program_of_jax_transposes_no_key():
    jax = importlib.import_module("jax")
    query, key = (jax.ShapeDtypeStruct(dims, np.float32) for dims in ((1, 4, 3, 7), (1, 2, 400, 7)))
    program = jax.jit(lambda *arrays: attention(*arrays, mask=ac.Causal(offset=397))).lower(query, key, key)
    assert "x400x7x" in program.as_text()
    assert "x7x400x" not in program.as_text()


@pytest.mark.needs(lambda sizes, backend: not backend.loops.traced or sizes == (9, 5))
@pytest.mark.parametrize("sizes", [(5, 5), (5, 9), (9, 5)])
def test_a_rule_says_that_no_row_is_empty_only_if_none_is(sizes, backend, put, xp, rng):
    query, key = put([rng.standard_normal((1, 2, length, D)) for length in sizes])
    rules = [ac.Causal(offset=offset) for offset in range(-10, 3)]
    rules += [
        ac.SlidingWindow(left=left, right=right, offset=offset)
        for left, right in ((2, 0), (0, 3), (9, 9), (None, 1))
        for offset in (-6, 0, 6)
    ]
    for rule in (
        *rules,
        *(And(ac.Causal(), rule) for rule in rules),
        *(Or(ac.Causal(offset=-9), rule) for rule in rules),
    ):
        scores = [attention(query, key, key, mask=each, implementation="dense") for each in (rule, rule & ~rule | rule)]
        np.testing.assert_allclose(*map(backend.to_numpy, scores), rtol=1e-5, atol=1e-6)
