"""Loops over blocks, as attention in blocks needs them, mean the same on every backend."""

import math

import numpy as np
import pytest

COMPILED = pytest.mark.needs("compilation", lambda backend: backend.name != "torch")  # which looks into no operator


@pytest.fixture(params=["eager", pytest.param("compiled", marks=COMPILED)])
def run(request, backend):
    """Run a function of arrays, eagerly or compiled."""
    if request.param == "eager":
        return lambda function, *arrays: backend.to_numpy(function(*backend.from_numpy(arrays)))
    return lambda function, *arrays: backend.to_numpy(backend.compile(function)(*backend.from_numpy(arrays)))


def test_a_body_sees_every_index_and_the_state_before(run, backend, xp):
    def function(x, stop):
        stop = stop if backend.loops.traced else int(stop)
        state = backend.loops.loop(1, stop, lambda i, s: (xp.add(xp.multiply(s[0], 10), i), s[1], s[2]), (x, x, None))
        assert state[2] is None
        less = backend.loops.loop(1, stop, lambda i, s: xp.add(s, i), x, proceed=lambda s: xp.less(s, 3))
        return state[0], state[1], backend.loops.loop(2, 2, lambda i, s: xp.add(s, 1), x), less

    many, same, none, less = run(function, np.array(0, dtype=np.int32), np.array(5, dtype=np.int32))
    assert (many, same, none, less) == (1234, 0, 0, 3)


def test_loops_nest_and_count_with_the_outer_index(run, backend, xp):
    loops = backend.loops

    def function(x):
        def outer(i, total):
            return loops.loop(0, i, lambda j, inner: xp.add(inner, i * 10 + j), total)

        return loops.loop(0, 4, outer, x)

    assert run(function, np.array(0, dtype=np.int32)) == 10 + 20 + 21 + 30 + 31 + 32


def test_one_of_two_functions_is_taken(run, backend, xp):
    def function(x):
        return [
            backend.loops.cond(xp.greater(x, limit), lambda: xp.add(x, 1.0), lambda: xp.subtract(x, 1.0))
            for limit in (1.0, 3.0)
        ]

    assert run(function, np.array(2.0)) == [3.0, 1.0]


def test_blocks_are_added_to_and_joined_in_order(run, backend, xp, rng):
    """Runs of three along the rows, of which one is left as it started: zero."""
    x = rng.standard_normal((6, 2, 2, 5))
    loops = backend.loops

    def function(x):
        stack = loops.zero_blocks(6, lambda index: xp.zeros_like(x[0, ...]))

        def body(i, stack):
            return loops.add_block(loops.add_block(stack, i, loops.block_at(x, i)), i, loops.block_at(x, 0))

        stack = loops.loop(0, 5, body, stack)
        joined = loops.concat_blocks(stack, 3, -2)
        wide = loops.concat_blocks(loops.concat_blocks(stack, 2, -1), 3, -2)
        return loops.stack_blocks(joined), loops.stack_blocks(wide), loops.stack_blocks(stack)

    sums = x + x[0]
    sums[5] = 0
    joined, wide, plain = run(function, x)
    np.testing.assert_array_equal(plain, sums)
    np.testing.assert_array_equal(joined, [np.concatenate(sums[:3], axis=-2), np.concatenate(sums[3:], axis=-2)])
    rows = [np.concatenate(sums[i : i + 2], axis=-1) for i in (0, 2, 4)]
    np.testing.assert_array_equal(wide, [np.concatenate(rows, axis=-2)])


@pytest.mark.needs("fused softmax")
@pytest.mark.parametrize("length", [1, 5, 40, 600])
@pytest.mark.parametrize("nonfinite", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_softmax_of_one_pass_is_the_softmax_and_hides_no_nonfinite_value(mode, backend, length, nonfinite, rng):
    x = rng.standard_normal((40, length)) * 5
    x[3, length // 2] = nonfinite
    with np.errstate(invalid="ignore"):
        expected = np.exp(x - x.max(axis=-1, keepdims=True))
        expected /= expected.sum(axis=-1, keepdims=True)
    for dtype, close in ((np.float32, 1e-5), (np.float64, 1e-13)):
        function = backend.compile(lambda x: backend.loops.softmax(x), mode=mode)
        found = backend.to_numpy(function(backend.from_numpy(x.astype(dtype))))
        np.testing.assert_array_equal(np.isnan(found).any(axis=-1), np.isnan(expected).any(axis=-1))
        seen = ~np.isnan(expected).any(axis=-1)
        np.testing.assert_allclose(found[seen], expected[seen], rtol=close)


@pytest.mark.needs("fused softmax")
@pytest.mark.parametrize("shape", [(2, 1, 2, 1, 2, 3, 40), (2, 1, 2, 0, 2, 3, 40), (1, 1, 1, 1, 2, 3, 0)])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_softmax_of_one_pass_takes_many_axes(mode, shape, backend, rng):
    x = rng.standard_normal(shape).astype(np.float32)
    function = backend.compile(lambda x: backend.loops.softmax(x), mode=mode)
    exponentials = np.exp(x)
    expected = exponentials / exponentials.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(backend.to_numpy(function(backend.from_numpy(x))), expected, rtol=1e-5)


@pytest.mark.needs("xla")
def test_programs_for_xla_have_no_softmax_of_one_pass(backend):
    seen = []
    for mode in ("graph", "xla"):
        backend.compile(lambda x: seen.append(backend.loops.softmax) or x, mode=mode)(backend.from_numpy(np.ones(3)))
    assert [each is None for each in seen] == [False, True]
