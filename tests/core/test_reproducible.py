"""Reproducible arithmetic: the same bits everywhere, and why they are.

The first tests are of bounds of the exact arithmetic itself, far below what a rounded result shows.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from reproducible_helpers import EXACTLY, LAYERS, NUMPY, B, D, E, G, H, M, N, float32, of_numpy, qkv, same

import attention_core as ac
import attention_models as models
from attention_core import scaled_dot_product_attention as attention
from attention_core._arithmetic import elementary, exact
from attention_core._attention.blocks import plan as _plan
from attention_core.random import Dropout


@pytest.mark.parametrize("terms", [1, 2, 3, 64, 127, 1024, 4096])
def test_the_longest_sum_of_the_largest_slices_is_exact_and_one_bit_more_is_not(terms):
    bits = exact.slice_bits(terms)
    assert 2 * bits + math.ceil(math.log2(terms)) <= 53
    largest = 3 * 2 ** (bits - 2)  # three quarters
    assert terms * largest**2 <= 2**53
    slices = np.full((1, terms), float(largest))
    assert int((slices @ slices.T)[0, 0]) == terms * largest**2
    assert 2 * (bits + 1) + math.ceil(math.log2(terms)) > 53


@pytest.mark.parametrize("bits", [1, 8, 20, 23])
def test_slices_are_integers_that_add_up_to_the_number(bits, rng):
    x = rng.standard_normal((5, 40)) * 2.0 ** rng.integers(-30, 30, (5, 40))
    power = exact.power_above_max(x, -1, NUMPY)
    parts = exact.slices(x, power, bits=bits, count=2, xp=NUMPY)
    for part, bound in zip(parts, (0.75, 0.5), strict=True):
        assert np.all(part == np.rint(part))
        assert np.abs(part).max() <= bound * 2**bits
    for index in np.ndindex(x.shape):
        whole = sum(Fraction(part[index]) / 2 ** (bits * n) for n, part in enumerate(parts, start=1))
        assert abs(Fraction(x[index]) / Fraction(power[index[0], 0]) - whole) <= Fraction(1, 2 ** (2 * bits + 1))


def test_rounding_is_to_the_nearest_float32_to_even(rng):
    x = rng.standard_normal(200000) * 2.0 ** rng.uniform(-150, 140, 200000)
    ties = np.float64(rng.standard_normal(1000).astype(np.float32))
    ties = np.concatenate([ties, (ties + np.nextafter(ties.astype(np.float32), np.float32(9))) / 2])
    x = np.concatenate([x, ties, [0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**128, -(2.0**128) * (1 - 2.0**-26)]])
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float32)
    wanted = np.where(np.abs(wanted) < 2.0**-126, np.float32(0), wanted)
    found = exact.round_to_float32(x, NUMPY)
    np.testing.assert_array_equal(found, wanted)
    assert not np.any(np.signbit(found[found == 0]))
    few = np.arange(-40, 41)
    edge = 2.0**-126 * np.concatenate([1 + few * 2.0**-27, 1 + few * 2.0**-52, (1 - 2.0**-25) * (1 + few * 2.0**-52)])
    without_large = np.concatenate([x[np.abs(x) < 2.0**127], edge, -edge])  # which takes fewer steps
    found = exact.round_to_float32(without_large, NUMPY).tobytes()
    assert found == exact.round_to_float32(np.append(without_large, 2.0**127), NUMPY)[:-1].tobytes()


@pytest.mark.parametrize(
    ("function", "formula", "low", "high", "bound", "relative"),
    [
        (elementary.exp2, lambda x: mpmath.mpf(2) ** x, -699.0, 500.0, -50.0, True),
        (elementary.exp2, lambda x: mpmath.mpf(2) ** x, -2.0, 1.0, -50.0, True),
        (elementary.log2, lambda x: mpmath.log(x, 2), 0.5, 2.0**40, -45.0, False),
        (elementary.tanh, mpmath.tanh, -30.0, 30.0, -46.0, True),
        (elementary.tanh, mpmath.tanh, -0.2, 0.2, -46.0, True),
        (elementary.sine, mpmath.sin, -0.79, 0.79, -51.0, True),
        (elementary.cosine, mpmath.cos, -0.79, 0.79, -51.0, True),
    ],
)
def test_elementary_functions_keep_the_error_bounds_they_name(function, formula, low, high, bound, relative, rng):
    x = rng.uniform(low, high, 3000)
    found = function(x, NUMPY)
    with mpmath.workprec(200):
        for value, number in zip(found, x, strict=True):
            wanted = formula(mpmath.mpf(float(number)))
            error = abs(mpmath.mpf(float(value)) - wanted) / (abs(wanted) if relative else 1)
            assert error <= mpmath.mpf(2) ** bound


def test_powers_of_two_of_integers_are_exact():
    exponents = np.arange(-700.0, 501.0)
    assert np.array_equal(elementary.exp2(exponents, NUMPY), np.ldexp(1.0, exponents.astype(int)))
    assert np.array_equal(elementary.exp2(np.array([-np.inf, -701.0, -1e300]), NUMPY), np.zeros(3))


def test_a_sample_next_to_much_larger_ones_has_the_same_bits(put, get, rng):
    """In attention and in a projection, whose rows are cut by powers of two of their own."""
    arrays = [float32(rng, 5, H, M, D), float32(rng, 5, G, N, D), float32(rng, 5, G, N, E)]
    for x, power in zip(arrays, (2.0**3, 2.0**3, 2.0**40), strict=True):
        x[::2] *= np.float32(power)
    attended = get(attention(*put(arrays), **EXACTLY))
    maps, rows = ac.parameters.Linear(*put((float32(rng, E, D), float32(rng, D)))), arrays[2]
    mapped = get(ac.functions.linear(maps, put(rows), **EXACTLY))
    for at in (1, 3):
        alone = put([x[at : at + 1] for x in arrays])
        same(get(attention(*alone, **EXACTLY))[0], attended[at])
        same(get(ac.functions.linear(maps, put(rows[at : at + 1]), **EXACTLY))[0], mapped[at])


def test_rows_in_blocks_have_the_bits_of_fewer_rows(put, get, rng):
    """More than are computed at once, some of which are not finite or subnormal, and a few of them alone."""
    x = float32(rng, 4000, 2, D)
    x[700, 1, 2], x[1999, 0, 0], x[2600, 1, 1], x[2000, 0] = math.nan, math.inf, 1e-40, -0.0
    weight, bias, table = float32(rng, D, E), float32(rng, E), float32(rng, 4000, E)
    maps, back = (ac.parameters.Linear(*put(each)) for each in ((weight, bias), (weight.T.copy(), bias[:D])))
    gated = ac.parameters.GatedFeedForward(maps, maps, back)
    tables = ac.parameters.Embeddings(*put((table, table[::-1].copy())))
    functions = (
        lambda x: ac.functions.linear(maps, x, **EXACTLY),
        lambda x: ac.functions.linear(models.prepare_weights(maps), x, **EXACTLY),
        lambda x: ac.functions.rms_norm(maps.weight[:, 0], x, **EXACTLY),
        lambda x: ac.functions.silu(x, **EXACTLY),
        lambda x: ac.functions.gelu(x, **EXACTLY),
        lambda x: ac.functions.feed_forward(gated, x, activation="gelu_tanh", **EXACTLY),
    )

    def embedded(at):
        places = put(np.arange(4000)[at])
        return get(ac.functions.embed_tokens(tables, places, position_ids=places, **EXACTLY))

    same(embedded(slice(None))[1990:2010], embedded(slice(1990, 2010)))
    for function in functions:
        whole = get(function(put(x)))
        for first, last in ((0, 3), (699, 702), (1990, 2010), (3990, 4000)):
            same(get(function(put(x[first:last]))), whole[first:last])


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 64), {"dropout": ac.Dropout(0.5, 3)}),
        ((64, 2**12), {"mask": ac.Causal(offset=20)}),
        ((64, 2**12), {}),
        ((128, 2**9), {"mask": ac.SlidingWindow(left=40, right=3)}),
        ((128, 2**9), {"mask": ac.Causal(offset=20)}),
        ((70, 2**14), {"mask": ac.SlidingWindow(left=40, right=3), "dropout": ac.Dropout(0.5, 3)}),
    ],
)
def test_the_size_of_blocks_does_not_show(sizes, options, backend, put, get, rng, monkeypatch):
    arrays = qkv(rng)
    options = {**options, "return_weights": True, "return_logsumexp": True, **EXACTLY}
    whole = attention(*arrays, **options)
    monkeypatch.setattr(_plan, "REPRODUCIBLE_KEYS", sizes[0])
    monkeypatch.setattr(backend, "tuning", backend.tuning._replace(exact_scores=sizes[1]))
    for found, wanted in zip(get(attention(*put(arrays), **options)), whole, strict=True):
        same(found, wanted)


def check_gradients(backend, loss, arrays, factors):
    """Those of ``loss(arithmetic, factors, *arrays)`` in reproducible arithmetic are near those in float64.

    Each is one program where eager JAX compiles one for each operation.
    """
    found = []
    for dtype, arithmetic in (("float32", "reproducible"), ("float64", "fast")):
        inputs, constants = backend.from_numpy([[x.astype(dtype) for x in each] for each in (arrays, factors)])
        gradients = backend.value_and_grad(functools.partial(loss, arithmetic, constants))
        program = backend.compile(gradients, mode="jit" if backend.name == "jax" else "eager")
        found.append(backend.to_numpy(program(*inputs)[1]))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-7 * np.abs(other).max() + 1e-30)


@pytest.mark.parametrize("name", ["plain", "capped", "biased"])
def test_scores_alone_are_correctly_rounded_and_have_the_gradients_of_float64(name, backend, rng):
    query, key, bias, factor = (float32(rng, *dims) for dims in ((B, H, M, D), (B, G, N, D), (H, 1, N), (B, H, M, N)))

    def scores(query, key, bias, arithmetic):
        options = {
            "plain": {},
            "capped": {"softcap": 2.0, "mask": ac.Causal(offset=60)},
            "biased": {"bias": bias, "mask": ac.SlidingWindow(left=50, right=70)},
        }
        return ac.attention_scores(query, key, **options[name], arithmetic=arithmetic)

    arrays = backend.from_numpy([query, key, bias])
    found = backend.to_numpy(scores(*arrays, "reproducible"))
    wanted = scores(*(x.astype(np.float64) for x in (query, key, bias)), "fast")
    assert np.mean(found == wanted.astype(np.float32)) > 0.999
    same(found, scores(query, key, bias, "reproducible"))
    xp = backend.namespace

    def loss(arithmetic, factors, *arrays):
        found = scores(*arrays, arithmetic)
        return xp.sum(xp.where(xp.isfinite(found), found, 0.0) * factors[0])

    if backend.differentiates and "float64" in backend.dtypes:
        check_gradients(backend, loss, (query, key, bias), (factor,))


def test_more_keys_than_are_summed_at_once(put, get, rng):
    arrays = float32(rng, 1, 1, 3, 8), float32(rng, 1, 1, 9001, 8), float32(rng, 1, 1, 9001, 5)
    found = get(attention(*put(arrays), **EXACTLY))
    order = rng.permutation(9001)
    same(get(attention(*put([arrays[0], *(x[:, :, order] for x in arrays[1:])]), **EXACTLY)), found)
    same(found, of_numpy(*arrays))


def oracle(query, key, value, mask=None):
    query, key, value = (x.astype(np.longdouble) for x in (query, key, value))
    key, value = (np.repeat(x, query.shape[1] // x.shape[1], axis=1) for x in (key, value))
    scores = np.einsum("bhmd,bhnd->bhmn", query, key) / np.sqrt(np.longdouble(query.shape[-1]))
    scores = scores if mask is None else np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhmn,bhne->bhme", weights, value), np.einsum("bhmn,bhne->bhme", weights, np.abs(value))


@pytest.mark.needs("dtype")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_of_16_bits_are_within_an_ulp_of_what_float64_gives(dtype, backend, rng):
    arrays = backend.to_numpy(backend.from_numpy(qkv(rng), dtype=dtype))
    found = backend.to_numpy(attention(*backend.from_numpy(arrays), **EXACTLY))
    assert found.dtype == arrays[0].dtype
    wanted, size = oracle(*arrays)
    unit = 2.0 ** (np.floor(np.log2(size.astype(np.float64))) - (10 if dtype == "float16" else 7))
    assert np.all(np.abs(found.astype(np.float64) - wanted.astype(np.float64)) <= 0.52 * unit)


@pytest.mark.needs("gradients")
def test_gradients_of_weights_sum_more_positions_than_one_product_does(backend, put, get, rng):
    """To the last bit, in any order of the positions."""
    x, factor = rng.standard_normal((2, 5000, 3)).astype(np.float32)
    exact, order, xp = x.astype(np.float64).T @ factor, rng.permutation(5000), backend.namespace

    def gradient(x, factor):
        def loss(weight):
            output = ac.functions.linear(ac.parameters.Linear(weight, None), put(x), arithmetic="reproducible")
            return xp.sum(xp.multiply(output, put(factor)))

        _, (of_weight,) = backend.value_and_grad(loss)(put(np.eye(3, dtype=np.float32)))
        return get(of_weight)

    found = gradient(x, factor)
    np.testing.assert_allclose(found, exact, rtol=2**-23.9, atol=0)
    np.testing.assert_array_equal(found, gradient(x[order], factor[order]))


@pytest.mark.needs("gradients", "float64")
def test_gradients_agree_with_those_in_float64(backend, rng):
    arrays = (*qkv(rng), float32(rng, H, 1, N))
    factors = float32(rng, B, H, M, E), float32(rng, B, H, M, N), float32(rng, B, H, M)
    options = {"mask": ac.Causal(offset=9), "softcap": 4.0, "dropout": Dropout(0.2, 7)}
    options |= {"return_weights": True, "return_logsumexp": True}

    def loss(arithmetic, factors, *arrays):
        found = attention(*arrays[:3], bias=arrays[3], **options, arithmetic=arithmetic)
        return sum(backend.namespace.sum(each * factor) for each, factor in zip(found, factors, strict=True))

    check_gradients(backend, loss, arrays, factors)


FAR = np.asarray([0, 1, -1, 5, 1000, -4097, 2**16 - 1, 2**17 + 3, 2**20 - 7, 2**24 + 1, 2**31 - 1, -(2**31)])


@pytest.mark.parametrize(
    ("base", "divisors"), [(10000.0, None), (500000.0, (0.25, 1, 1, 1.5, 3.1, 8, 8, 1e6)), (1, None), (1e300, None)]
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_channels_are_correctly_rounded_at_any_position(base, divisors, interleaved, rng):
    x = float32(rng, 1, len(FAR), 16)
    options = {"base": base, "interleaved": interleaved, "divisors": divisors, **EXACTLY}
    found, far = ac.functions.rotary_embedding(x, FAR, **options), []
    same(ac.functions.rotary_embedding(x, FAR.astype(np.int32), **options), found)
    with mpmath.workdps(80):
        for position, row, turned in zip(FAR, x[0].tolist(), found[0], strict=True):
            for pair in range(8):
                frequency = mpmath.mpf(base) ** (mpmath.mpf(-2 * pair) / 16) / (divisors[pair] if divisors else 1)
                angle = int(position) * frequency
                a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 8)
                wanted = row[a] * mpmath.cos(angle) - row[b] * mpmath.sin(angle)
                across = row[b] * mpmath.cos(angle) + row[a] * mpmath.sin(angle)
                far += [np.float32(float(wanted)) != turned[a], np.float32(float(across)) != turned[b]]
    assert np.mean(far) <= 0.01


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-320, 1e308])
def test_channels_over_the_root_of_their_mean_square_are_correctly_rounded(size, epsilon, rng):
    x, scale = (size * rng.standard_normal((40, 24))).astype(np.float32), float32(rng, 24)
    found = ac.functions.rms_norm(scale, x, epsilon=epsilon, **EXACTLY)
    with mpmath.workdps(60):
        for row, given_row in zip(found, x, strict=True):
            squares = sum(mpmath.mpf(float(each)) ** 2 for each in given_row)
            root = mpmath.sqrt(squares / 24 + mpmath.mpf(epsilon))
            products = [mpmath.mpf(float(a)) * float(b) for a, b in zip(given_row, scale, strict=True)]
            wanted = np.float32([float(product / root) for product in products])
            assert np.mean(row == np.where(np.abs(wanted) < 2.0**-126, np.float32(0), wanted)) >= 0.99


@pytest.mark.parametrize("name", LAYERS)
def test_layer_functions_and_their_gradients_agree_with_float64_to_half_an_ulp(name, backend, rng):
    x, weight = float32(rng, 3, 50, 32) * np.float32(3), float32(rng, 32, 32)
    factor = float32(rng, *LAYERS[name](x, weight).shape)
    function = LAYERS[name]
    found = backend.to_numpy(function(*backend.from_numpy((x, weight)), **EXACTLY))
    wanted = function(x.astype(np.float64), weight.astype(np.float64))
    steps = 1.01 if name == "spectral_norm" else 0.51  # the norm of one result is rounded before the next step
    size = np.abs(wanted) if name != "linear" else np.abs(x.astype(np.float64)) @ np.abs(weight.astype(np.float64))
    size = np.maximum(size, np.abs(weight[:, 1]) + 1.0) if name == "layer_norm" else size
    limit = steps * (8 if name == "spectral_norm" else 1) * np.spacing(size.astype(np.float32)).astype(np.float64)
    assert np.all(np.abs(found - wanted) <= limit + 1e-37)

    def loss(arithmetic, factors, x, weight):
        return backend.namespace.sum(function(x, weight, arithmetic=arithmetic) * factors[0])

    if backend.differentiates:
        check_gradients(backend, loss, (x, weight), (factor,))
