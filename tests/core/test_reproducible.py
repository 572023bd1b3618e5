"""Reproducible arithmetic: the same bits everywhere, and why they are."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attention_core as ac
from attention_core import get_backend, layers
from attention_core import scaled_dot_product_attention as attention
from attention_core._arithmetic import elementary, exact, reproducible
from attention_core._attention.blocks import plan as _plan
from attention_core._attention.reproducible import slices as _slices
from attention_core._backend._find import backend_of
from attention_core.random import Dropout

NUMPY = get_backend("numpy").namespace
EXACTLY = {"arithmetic": "reproducible"}
B, H, G, M, N, D, E = 2, 4, 2, 37, 150, 16, 24


def float32(rng, *dims):
    return rng.standard_normal(dims).astype(np.float32)


def qkv(rng):
    return float32(rng, B, H, M, D), float32(rng, B, G, N, D), float32(rng, B, G, N, E)


def same(first, second):
    """Bit for bit, whatever nan."""
    assert first.dtype == second.dtype
    np.testing.assert_array_equal(first.view(np.uint32), second.view(np.uint32))


def of_numpy(*arrays, **options):
    return attention(*arrays, **options, **EXACTLY)


# The steps, against integers of unlimited precision and mpmath


def test_a_power_of_two_lies_within_its_bounds_above_a_number(rng):
    ends = [x * 2.0**k for k in range(-300, 300) for x in (1.0, 1.5, np.nextafter(1.5, 0), np.nextafter(1.5, 2))]
    x = np.concatenate([2.0 ** rng.uniform(-200, 200, 20000), ends, np.nextafter(ends, 0), np.nextafter(ends, np.inf)])
    power = exact.power_above(x, NUMPY)
    assert np.all(np.frexp(power)[0] == 0.5)
    assert np.all(x <= 0.75 * power)
    assert np.all(x >= 0.375 * power)
    assert exact.power_above(np.zeros(1), NUMPY)[0] == 1.0


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


def test_sums_of_two_parts_each_are_those_of_unlimited_integers(rng):
    terms = [int(x) for x in rng.integers(-(2**53), 2**53, 1000)]
    parts = exact.split_carry(np.asarray(terms, dtype=np.float64), NUMPY)
    assert np.all(parts[0] * 2**26 + parts[1] == np.asarray(terms, dtype=np.float64))
    found = exact.join_carry(tuple(part.sum() for part in parts), NUMPY)
    assert float(found) == float(sum(terms))  # of Python, which rounds once


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


@pytest.mark.parametrize(
    ("function", "formula", "low", "high", "bound", "relative"),
    [
        (elementary.exp2_weight, lambda x: mpmath.mpf(2) ** (256 * x), -0.25, 0.0, -38.0, False),
        (elementary.exp2, lambda x: mpmath.mpf(2) ** x, -150.0, 0.0, -42.0, True),
        (elementary.log2, lambda x: mpmath.log(x, 2), 0.5, 2.0**40, -45.0, False),
        (elementary.tanh, mpmath.tanh, -30.0, 30.0, -38.0, True),
        (elementary.tanh, mpmath.tanh, -0.2, 0.2, -38.0, True),
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


def test_the_largest_weight_is_exactly_one():
    assert elementary.exp2_weight(np.zeros(1), NUMPY)[0] == 1.0
    assert elementary.exp2_weight(np.full(1, -np.inf), NUMPY)[0] < 2.0**-60


@pytest.mark.needs("float64")
def test_a_division_by_a_broadcast_number_is_the_same_compiled(backend, rng):
    x, divisor = rng.standard_normal((300, 18)), rng.uniform(1, 2, (300, 1))
    wanted = exact.divide_rows(x, divisor, NUMPY)
    np.testing.assert_allclose(wanted, x / divisor, rtol=2.0**-51)

    def function(x, divisor):
        xp = backend.namespace
        return exact.divide_rows(x, exact.uncontracted(xp.sqrt(xp.multiply(divisor, divisor)), xp), xp)

    for mode in backend.modes:
        found = backend.compile(function, mode=mode)(*backend.from_numpy((x, divisor)))
        np.testing.assert_array_equal(backend.to_numpy(found), exact.divide_rows(x, np.sqrt(divisor * divisor), NUMPY))


# Independence of batch, heads, block sizes and options


def test_a_batch_element_has_the_same_bits_alone(put, get, rng):
    arrays = float32(rng, 8, H, M, D), float32(rng, 8, G, N, D), float32(rng, 8, G, N, E)
    whole = get(attention(*put(arrays), is_causal=True, **EXACTLY))
    for index in range(8):
        same(get(attention(*put([x[index : index + 1] for x in arrays]), is_causal=True, **EXACTLY))[0], whole[index])


def test_a_head_has_the_same_bits_alone(put, get, rng):
    arrays = qkv(rng)
    whole = get(attention(*put(arrays), softcap=3.0, **EXACTLY))
    for head in range(H):
        one_head = [arrays[0][:, head : head + 1], *(x[:, head // 2 : head // 2 + 1] for x in arrays[1:])]
        same(get(attention(*put(one_head), softcap=3.0, **EXACTLY))[:, 0], whole[:, head])


@pytest.mark.parametrize("sizes", [(1, 64), (64, 2**12), (128, 2**9), (70, 2**14)])
@pytest.mark.parametrize("mask", [None, ac.Causal(20), ac.SlidingWindow(40, 3)])
def test_the_size_of_blocks_does_not_show(sizes, mask, backend, put, get, rng, monkeypatch):
    arrays = qkv(rng)
    whole = get(attention(*put(arrays), mask=mask, return_logsumexp=True, **EXACTLY))
    monkeypatch.setattr(_plan, "REPRODUCIBLE_KEYS", sizes[0])
    monkeypatch.setattr(backend, "tuning", backend.tuning._replace(exact_scores=sizes[1]))
    cut = get(attention(*put(arrays), mask=mask, return_logsumexp=True, **EXACTLY))
    same(cut.output, whole.output)
    same(cut.logsumexp, whole.logsumexp)


@pytest.mark.parametrize("implementation", ["auto", "dense", "blockwise"])
def test_neither_the_implementation_nor_the_return_flags_show(implementation, put, get, rng):
    arrays = qkv(rng)
    output = of_numpy(*arrays, mask=ac.Causal(5))
    found = get(
        attention(
            *put(arrays),
            mask=ac.Causal(5),
            implementation=implementation,
            return_weights=implementation != "blockwise",
            return_logsumexp=True,
            **EXACTLY,
        )
    )
    same(found.output, output)


@pytest.mark.parametrize("name", ["plain", "capped", "biased"])
def test_scores_alone_are_correctly_rounded_and_have_the_gradients_of_float64(name, backend, rng):
    query, key, bias, factor = (float32(rng, *dims) for dims in ((B, H, M, D), (B, G, N, D), (H, 1, N), (B, H, M, N)))

    def scores(query, key, bias, arithmetic):
        options = {
            "plain": {},
            "capped": {"softcap": 2.0, "mask": ac.Causal(60)},
            "biased": {"bias": bias, "mask": ac.SlidingWindow(50, 70)},
        }
        return ac.attention_scores(query, key, **options[name], arithmetic=arithmetic)

    arrays = backend.from_numpy([query, key, bias])
    found = backend.to_numpy(scores(*arrays, "reproducible"))
    wanted = scores(*(x.astype(np.float64) for x in (query, key, bias)), "fast")
    assert np.mean(found == wanted.astype(np.float32)) > 0.999
    same(found, scores(query, key, bias, "reproducible"))
    if not backend.differentiates or "float64" not in backend.dtypes:
        return
    xp = backend.namespace

    def gradients(dtype, arithmetic):
        *arrays, cotangent = backend.from_numpy([x.astype(dtype) for x in (query, key, bias, factor)])

        def loss(*arrays):
            found = scores(*arrays, arithmetic)
            return xp.sum(xp.where(xp.isfinite(found), found, 0.0) * cotangent)

        return backend.to_numpy(backend.value_and_grad(loss)(*arrays)[1])

    for one, other in zip(gradients("float32", "reproducible"), gradients("float64", "fast"), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-7 * np.abs(other).max())


def test_more_keys_than_are_summed_at_once(put, get, rng):
    arrays = float32(rng, 1, 1, 3, 8), float32(rng, 1, 1, 9001, 8), float32(rng, 1, 1, 9001, 5)
    found = get(attention(*put(arrays), **EXACTLY))
    order = rng.permutation(9001)
    same(get(attention(*put([arrays[0], *(x[:, :, order] for x in arrays[1:])]), **EXACTLY)), found)
    same(found, of_numpy(*arrays))


CONFIGURATIONS = [
    ((1, 1, 5, 8), (1, 1, 9, 8), 4),
    ((2, 2, 3, 16), (2, 1, 7, 16), 16),
    ((1, 3, 1, 1), (1, 3, 1, 1), 1),
    ((1, 2, 33, 5), (1, 2, 65, 5), 3),
]


@settings(max_examples=420)
@given(
    st.integers(0, len(CONFIGURATIONS) - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 60),
    st.sampled_from([1.0, 0.7, 0.1, 0.0]),
    st.sampled_from(["float32", "float16"]),
)
def test_any_numbers_have_the_same_bits_as_in_numpy(backend, number, seed, spread, density, dtype):
    if dtype not in backend.dtypes:
        dtype = "float32"
    query, key, width = CONFIGURATIONS[number]
    rng = np.random.default_rng(seed)

    def drawn(*dims):
        return (rng.standard_normal(dims) * 2.0 ** rng.integers(-spread, spread + 1, dims)).astype(np.float32)

    with np.errstate(over="ignore"):
        arrays = [x.astype(dtype) for x in (drawn(*query), drawn(*key), drawn(*key[:-1], width))]
    mask = rng.random((*query[:-1], key[-2])) < density
    found = _attended(backend, number, dtype)(*backend.from_numpy([*arrays, mask]))
    wanted = attention(*arrays, mask=mask, return_logsumexp=True, **EXACTLY)
    for one, other in zip(backend.to_numpy(found), (wanted.output, wanted.logsumexp), strict=True):
        np.testing.assert_array_equal(one.view(f"u{one.itemsize}"), other.view(f"u{other.itemsize}"))


@pytest.mark.parametrize("name", ["rms_norm", "rotary", "interleaved"])
@given(st.integers(0, 2**32 - 1), st.integers(0, 60))
def test_normalized_and_rotated_numbers_and_their_gradients_have_the_same_bits_as_in_numpy(name, backend, seed, spread):
    rng = np.random.default_rng(seed)
    x, out, scale = (
        (rng.standard_normal(dims) * 2.0 ** rng.integers(-spread, spread + 1, dims)).astype(np.float32)
        for dims in ((2, 2, 3, 6), (2, 2, 3, 6), (6,))
    )
    places = rng.integers(-(2**31), 2**31, (2, 3)).astype(np.int32)
    plain = get_backend("numpy")
    if name == "rms_norm":
        plan, arrays = reproducible.Constants(1e-6), (x.reshape(-1, 6), scale)
        operation, given_arrays = reproducible.NORMALIZE_RMS, (x, scale)
    else:
        plan, arrays = reproducible.Rotation(1e4, 4, name == "interleaved"), (x, places[:, None, :, None])
        operation, given_arrays = reproducible.ROTATE, (x, places)
    wanted = operation.forward(plan, arrays, plain)
    found = backend.to_numpy(_mapped(backend, name)(*backend.from_numpy(given_arrays)))
    same(found, wanted[0].reshape(x.shape))
    if not backend.differentiates:
        return
    wanted = operation.backward(plan, arrays, wanted, (out.reshape(wanted[0].shape),), plain)
    found = backend.to_numpy(_mapped(backend, name, backward=True)(*backend.from_numpy((out, *given_arrays))))
    for one, other in zip(found, wanted, strict=True):
        if other is not None:  # positions have none
            same(one, other.reshape(one.shape))


_compiled = {}


def _mapped(backend, name, backward=False):
    """Normalization or rotation, or its gradients for a cotangent, compiled once as in `_attended`."""
    function = {
        "rms_norm": lambda x, scale: ac.rms_norm(scale, x, **EXACTLY),
        "rotary": lambda x, places: ac.rotary_embedding(x, places, width=4, **EXACTLY),
        "interleaved": lambda x, places: ac.rotary_embedding(x, places, width=4, interleaved=True, **EXACTLY),
    }[name]

    def gradients(out, *arrays):
        return backend.value_and_grad(lambda *leaves: backend.namespace.sum(function(*leaves) * out))(*arrays)[1]

    if (backend.name, name, backward) not in _compiled:
        mode = {"jax": "jit", "tensorflow": "graph"}.get(backend.name, "eager")
        _compiled[backend.name, name, backward] = backend.compile(gradients if backward else function, mode=mode)
    return _compiled[backend.name, name, backward]


def _attended(backend, number, dtype):
    """A function of arrays, compiled once by libraries that take their time to run a single call."""
    mode = {"jax": "jit", "tensorflow": "graph"}.get(backend.name, "eager")

    def function(query, key, value, mask):
        found = attention(query, key, value, mask=mask, return_logsumexp=True, **EXACTLY)
        return found.output, found.logsumexp

    name = backend.name, number, dtype
    if name not in _compiled:
        _compiled[name] = backend.compile(function, mode=mode)
    return _compiled[name]


# Accuracy


def oracle(query, key, value, mask=None):
    query, key, value = (x.astype(np.longdouble) for x in (query, key, value))
    key, value = (np.repeat(x, query.shape[1] // x.shape[1], axis=1) for x in (key, value))
    scores = np.einsum("bhmd,bhnd->bhmn", query, key) / np.sqrt(np.longdouble(query.shape[-1]))
    scores = scores if mask is None else np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhmn,bhne->bhme", weights, value), np.einsum("bhmn,bhne->bhme", weights, np.abs(value))


@pytest.mark.parametrize("length", [64, 1024])
def test_nearly_all_results_are_the_correctly_rounded_ones(length, rng):
    arrays = [float32(rng, 1, 2, length, 64) for _ in range(3)]
    found, (wanted, size) = of_numpy(*arrays), oracle(*arrays)
    assert np.mean(found == wanted.astype(np.float32)) >= 0.99
    assert np.all(np.abs(found - wanted) <= 0.51 * np.spacing(size.astype(np.float32)))


def test_near_ties_of_large_scores_are_told_apart(rng):
    query, key, value = float32(rng, 1, 1, 6, 64), float32(rng, 1, 1, 80, 64), float32(rng, 1, 1, 80, 8)
    query, key = query * np.float32(300), np.float32(1) + key * np.float32(2.0**-18)
    found, (wanted, size) = of_numpy(query, key, value), oracle(query, key, value)
    assert np.all(np.abs(found - wanted) <= 0.51 * np.spacing(size.astype(np.float32)))


@pytest.mark.needs("dtype")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_of_16_bits_are_within_an_ulp_of_what_float64_gives(dtype, backend, rng):
    arrays = backend.to_numpy(backend.from_numpy(qkv(rng), dtype=dtype))
    found = backend.to_numpy(attention(*backend.from_numpy(arrays), **EXACTLY))
    assert found.dtype == arrays[0].dtype
    wanted, size = oracle(*arrays)
    unit = 2.0 ** (np.floor(np.log2(size.astype(np.float64))) - (10 if dtype == "float16" else 7))
    assert np.all(np.abs(found.astype(np.float64) - wanted.astype(np.float64)) <= 0.52 * unit)


@pytest.mark.needs("gradients", "float64")
def test_gradients_agree_with_those_in_float64(backend, rng):
    arrays = (*qkv(rng), float32(rng, H, 1, N))
    factors = float32(rng, B, H, M, E), float32(rng, B, H, M)

    def gradients(dtype, arithmetic):
        xp = backend.namespace
        inputs = backend.from_numpy([x.astype(dtype) for x in (*arrays, *factors)])

        def loss(query, key, value, bias):
            found = attention(
                query,
                key,
                value,
                bias=bias,
                mask=ac.Causal(9),
                softcap=4.0,
                dropout=Dropout(0.2, 7),
                return_logsumexp=True,
                arithmetic=arithmetic,
            )
            return xp.sum(found.output * inputs[4]) + xp.sum(found.logsumexp * inputs[5])

        return backend.to_numpy(backend.value_and_grad(loss)(*inputs[:4])[1])

    for found, wanted in zip(gradients("float32", "reproducible"), gradients("float64", "fast"), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-7 * np.abs(wanted).max())


FAR = np.asarray([0, 1, -1, 5, 1000, -4097, 2**16 - 1, 2**17 + 3, 2**20 - 7, 2**24 + 1, 2**31 - 1, -(2**31)])


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1, 1e300])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_channels_are_correctly_rounded_at_any_position(base, interleaved, rng):
    x = float32(rng, 1, len(FAR), 16)
    options = {"base": base, "interleaved": interleaved, **EXACTLY}
    found, far = ac.rotary_embedding(x, FAR, **options), []
    same(ac.rotary_embedding(x, FAR.astype(np.int32), **options), found)
    with mpmath.workdps(80):
        for position, row, turned in zip(FAR, x[0].tolist(), found[0], strict=True):
            for pair in range(8):
                angle = int(position) * mpmath.mpf(base) ** (mpmath.mpf(-2 * pair) / 16)
                a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 8)
                wanted = row[a] * mpmath.cos(angle) - row[b] * mpmath.sin(angle)
                across = row[b] * mpmath.cos(angle) + row[a] * mpmath.sin(angle)
                far += [np.float32(float(wanted)) != turned[a], np.float32(float(across)) != turned[b]]
    assert np.mean(far) <= 0.01


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-320, 1e308])
def test_channels_over_the_root_of_their_mean_square_are_correctly_rounded(size, epsilon, rng):
    x, scale = (size * rng.standard_normal((40, 24))).astype(np.float32), float32(rng, 24)
    found = ac.rms_norm(scale, x, epsilon=epsilon, **EXACTLY)
    with mpmath.workdps(60):
        for row, given_row in zip(found, x, strict=True):
            squares = sum(mpmath.mpf(float(each)) ** 2 for each in given_row)
            root = mpmath.sqrt(squares / 24 + mpmath.mpf(epsilon))
            products = [mpmath.mpf(float(a)) * float(b) for a, b in zip(given_row, scale, strict=True)]
            wanted = np.float32([float(product / root) for product in products])
            assert np.mean(row == np.where(np.abs(wanted) < 2.0**-126, np.float32(0), wanted)) >= 0.99


def positions(x):
    xp = backend_of(x).namespace if backend_of(x) else NUMPY
    return xp.arange(x.shape[-2], dtype=xp.int32)


LAYERS = {
    "rms_norm": lambda x, w, **o: ac.rms_norm(w[:, 0], x, **o),
    "rotary": lambda x, w, **o: ac.rotary_embedding(x, positions(x), **o),
    "linear": lambda x, w, **o: ac.linear(ac.parameters.Linear(w), x, **o),
    "layer_norm": lambda x, w, **o: ac.layer_norm(ac.parameters.LayerNorm(w[:, 0], w[:, 1]), x, **o),
    "gelu": lambda x, w, **o: ac.gelu(x, **o),
    "spectral_norm": lambda x, w, **o: ac.spectral_norm(w, w[0, :], **o)[0],
}


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
    if not backend.differentiates:
        return
    xp = backend.namespace

    def gradients(dtype, arithmetic):
        inputs = backend.from_numpy([each.astype(dtype) for each in (x, weight, factor)])

        def loss(x, weight):
            return xp.sum(function(x, weight, arithmetic=arithmetic) * inputs[2])

        return backend.to_numpy(backend.value_and_grad(loss)(*inputs[:2])[1])

    for one, other in zip(gradients("float32", "reproducible"), gradients("float64", "fast"), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-7 * np.abs(other).max() + 1e-30)


# NaN, infinities, subnormal numbers and empty axes


def test_nan_and_infinities_show_only_where_they_are_attended_to(put, get, rng):
    query, key, value = (float32(rng, 1, 1, 4, 4) for _ in range(3))
    value[0, 0, 1, 0], value[0, 0, 2, 1], value[0, 0, 3, 2] = np.inf, -np.inf, np.nan
    mask = np.tril(np.ones((4, 4), dtype=bool))
    found = get(attention(*put([query, key, value]), mask=put(mask), **EXACTLY))[0, 0]
    assert np.isfinite(found[0]).all()
    assert found[1, 0] == np.inf
    assert found[2, 1] == -np.inf
    assert np.isnan(found[3, 2])
    assert np.isfinite(found[:, 3]).all()
    key[0, 0, 2, 0] = np.nan
    found = get(attention(*put([query, key, value]), mask=put(mask), **EXACTLY))[0, 0]
    assert np.isfinite(found[:2, 1:]).all()
    assert np.isnan(found[2:]).all()
    same(found, of_numpy(query, key, value, mask=mask)[0, 0])


def test_a_fully_masked_row_gives_zero(put, get, rng):
    arrays = qkv(rng)
    lengths = put(np.array([0, 9]))
    found = get(
        attention(*put(arrays), mask=ac.KeyLengths(lengths), return_weights=True, return_logsumexp=True, **EXACTLY)
    )
    assert not np.any(found.output[0])
    assert not np.any(found.weights[0])
    assert np.all(found.logsumexp[0] == -np.inf)
    assert np.all(found.weights[1, ..., 9:] == 0)
    np.testing.assert_allclose(found.weights[1].sum(axis=-1), 1, rtol=1e-6)


def test_subnormal_numbers_count_as_zero(put, get, rng):
    arrays = qkv(rng)
    tiny = [np.where(np.abs(x) < 0.5, np.float32(1e-40), x) for x in arrays]
    none = [np.where(np.abs(x) < 0.5, np.float32(0), x) for x in arrays]
    same(get(attention(*put(tiny), **EXACTLY)), of_numpy(*none))


def test_subnormal_numbers_are_zero_even_where_products_are_not(put, get):
    x, weight = np.full((1, 2), 1e-40, dtype=np.float32), np.full((2, 1), 1e10, dtype=np.float32)
    found = get(ac.linear(ac.parameters.Linear(put(weight)), put(x), **EXACTLY))
    same(found, np.zeros((1, 1), dtype=np.float32))


@pytest.mark.parametrize("dims", [(0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (2, 3, 0, 4, 5), (2, 3, 4, 0, 5), (2, 3, 4, 5, 0)])
def test_empty_axes(dims, put, get, rng):
    rows, columns, depth, width, batch = dims
    arrays = (
        float32(rng, batch, 1, rows, depth),
        float32(rng, batch, 1, columns, depth),
        float32(rng, batch, 1, columns, width),
    )
    found = get(attention(*put(arrays), scale=1.0, **EXACTLY))
    assert found.shape == (batch, 1, rows, width)
    same(found, of_numpy(*arrays, scale=1.0))
    if depth == 0 and columns and batch:
        np.testing.assert_allclose(
            found, np.broadcast_to(arrays[2].mean(axis=-2, keepdims=True), found.shape), rtol=1e-6
        )


def test_a_pair_is_not_finite_where_one_of_its_channels_is_not(put, get):
    x = np.ones((1, 5, 6), dtype=np.float32)
    x[0, 0, 0], x[0, 1, 2], x[0, 2, 1] = np.inf, -np.inf, np.nan
    kept = np.asarray([-0.0, 1e-40, np.inf, -np.inf, 1.0], dtype=np.float32)
    x[0, :, 4], x[0, :, 5] = kept, -kept
    found = get(ac.rotary_embedding(put(x), put(np.arange(5)), width=4, **EXACTLY))
    for row, hit in enumerate(([0, 2], [0, 2], [1, 3], [], [])):
        np.testing.assert_array_equal(np.flatnonzero(np.isnan(found[0, row, :4])), hit)
    same(np.ascontiguousarray(found[..., 4:]), np.ascontiguousarray(x[..., 4:]))


def test_a_row_to_normalize_is_not_finite_where_one_of_its_channels_is_not(put, get):
    x, scale = np.ones((4, 3), dtype=np.float32), np.asarray([1.0, -2.0, np.inf], dtype=np.float32)
    x[0, 0], x[1, 1], x[3] = np.inf, np.nan, 0.0
    with np.errstate(invalid="ignore"):  # of 0 * inf
        found = get(ac.rms_norm(put(scale), put(x), epsilon=1e-35, **EXACTLY))
    assert np.isnan(found[:2]).all()
    np.testing.assert_array_equal(found[2:], np.asarray([[1, -2, np.inf], [0, 0, np.nan]], dtype=np.float32))


def test_attention_over_a_cache_has_the_bits_of_attention_without(backend, rng, get, put):
    xp = backend.namespace
    query, key, value = (put(float32(rng, 2, heads, 7, 8)) for heads in (4, 2, 2))
    whole = get(attention(query, key, value, is_causal=True, **EXACTLY))
    cache = ac.empty_cache((2,), 2, 11, 8, dtype=xp.float32, xp=xp)
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        new = slice(start, stop)
        cache = ac.append(cache, key[:, :, new, :], value[:, :, new, :])
        mask = ac.cache_mask(cache, stop - start)
        found = attention(query[:, :, new, :], cache.key, cache.value, mask=mask, **EXACTLY)
        same(np.ascontiguousarray(get(found)), np.ascontiguousarray(whole[:, :, new]))


@pytest.mark.needs("gradients")
@pytest.mark.parametrize("name", ["linear", "layer_norm", "rms_norm"])
def test_parameters_that_no_row_uses_have_a_gradient_of_zero(name, backend, rng):
    x, weight = backend.from_numpy((float32(rng, 0, 8), float32(rng, 8, 8)))
    _, (of_x, of_weight) = backend.value_and_grad(
        lambda x, weight: backend.namespace.sum(LAYERS[name](x, weight, **EXACTLY))
    )(x, weight)
    assert of_x.shape == (0, 8)
    same(backend.to_numpy(of_weight), np.zeros((8, 8), dtype=np.float32))


# Refused arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arithmetic": "exact"}, "expected an arithmetic out of fast, reproducible; got 'exact'"),
        ({"score_mod": lambda scores, *_: scores}, "expected no score_mod"),
        ({"implementation": "fused"}, "expected another implementation with arithmetic='reproducible'"),
        ({"scale": "array"}, "expected scale as a number with arithmetic='reproducible'"),
        ({"sinks": "array"}, "expected no sinks"),
    ],
)
def test_unsupported_options_are_refused(options, message, put, rng):
    options_with_arrays = {
        name: put(np.ones(H, dtype=np.float32)) if value == "array" else value for name, value in options.items()
    }
    if "scale" in options_with_arrays:
        options_with_arrays["scale"] = options_with_arrays["scale"][0, ...]
    with pytest.raises(ValueError, match=message):
        attention(*put(qkv(rng)), **{**EXACTLY, **options_with_arrays})


@pytest.mark.needs("float64")
def test_float64_is_refused(backend, put, rng):
    arrays = put([x.astype(np.float64) for x in qkv(rng)])
    with pytest.raises(ValueError, match="expected query of float16, bfloat16 or float32"):
        attention(*arrays, **EXACTLY)
    with pytest.raises(ValueError, match="expected x of float16, bfloat16 or float32"):
        ac.rms_norm(arrays[0][0, 0, 0, :], arrays[0], **EXACTLY)
    with pytest.raises(ValueError, match="expected x of float16, bfloat16 or float32"):
        ac.rotary_embedding(arrays[0], put(np.asarray(3)), **EXACTLY)


def test_a_device_without_float64_is_refused():
    class Somewhere:
        dtype, device = np.dtype("float32"), "mps:0"

    from attention_core._arithmetic import check_arithmetic

    with pytest.raises(ValueError, match="expected query on a device that has float64"):
        check_arithmetic("reproducible", "query", Somewhere())


# Layers


@pytest.mark.parametrize("kind", ["EncoderLayer", "FeedForward", "MultiHeadAttention", "Embeddings", "SaganAttention"])
def test_layers_take_the_setting(kind, backend, rng):
    definition = {
        "EncoderLayer": layers.EncoderLayer(16, 2, 32, dropout=0.1),
        "FeedForward": layers.FeedForward(16, 32, dropout=0.1),
        "MultiHeadAttention": layers.MultiHeadAttention(16, 2, extra_key_value=True, dropout=0.1),
        "Embeddings": layers.Embeddings(11, 9, 16, 2, dropout=0.1),
        "SaganAttention": layers.SaganAttention(16, data_format="channels_first"),
    }[kind]
    exact = dataclasses.replace(definition, **EXACTLY)
    parameters = exact.init(3, xp=NUMPY)
    inputs = float32(rng, 2, 7, 16)
    options = {"seed": 5}
    if kind == "Embeddings":
        inputs = rng.integers(0, 11, (2, 7))
    if kind == "SaganAttention":
        inputs, options = float32(rng, 2, 16, 4, 6), {}
        parameters = parameters._replace(sigma=np.asarray(0.5, dtype=np.float32))
        options = {"state": exact.init_state(3, xp=NUMPY)}
    placed = backend.from_numpy((parameters, inputs, options.get("state")))
    placed_options = {**options, "state": placed[2]} if "state" in options else options
    found = backend.to_numpy(exact(*placed[:2], **placed_options))
    same(found, exact(parameters, inputs, **options))
    np.testing.assert_allclose(found, definition(parameters, inputs, **options), rtol=1e-4, atol=1e-5)


def test_slices_have_as_many_bits_as_exact_sums_allow():
    """Sums of 4096 products: of weights up to 4 / 3 and of d_scores up to 1, with their other factors."""
    for count, bits in _slices.WEIGHT_BITS.items():
        assert exact.LONGEST * 2**bits * Fraction(3, 4) * 2 ** _slices.VALUE_BITS[count] <= 2**53
    weight = Fraction(4, 3) * 2 ** _slices.WEIGHT_BITS[2]
    assert exact.LONGEST * weight * Fraction(3, 4) * 2**_slices.D_OUTPUT_BITS <= 2**53
    d_score = 2**_slices.D_SCORE_BITS
    assert exact.LONGEST * d_score * Fraction(3, 4) * 2**_slices.D_SCORE_FACTOR_BITS <= 2**53


@pytest.mark.needs("gradients")
@pytest.mark.parametrize("dims", [(B, H, M, N), (1, 1, 1, N), (1, H, M, N), (B, 1, M, N)])
def test_the_gradient_of_a_bias_depends_only_on_rows_that_share_it(dims, backend, rng):
    arrays, bias, factor = qkv(rng), float32(rng, *dims), float32(rng, B, H, M, E)
    factor[1] *= np.float32(1e9)
    xp = backend.namespace

    def gradient(factor, *arrays):
        *qkv_arrays, bias, factor = backend.from_numpy((*arrays, factor))

        def loss(bias):
            return xp.sum(attention(*qkv_arrays, bias=bias, **EXACTLY) * factor)

        return backend.to_numpy(backend.value_and_grad(loss)(bias)[1][0])

    whole = gradient(factor, *arrays, bias)
    if dims[0] == B:
        for index in range(B):
            sample = [x[index : index + 1] for x in (factor, *arrays, bias)]
            same(gradient(*sample)[0], whole[index])
    else:
        assert np.isfinite(whole).all()
        assert np.abs(whole).max() > 1e3


@pytest.mark.needs("gradients")
def test_reproducible_arithmetic_is_differentiated_once(backend, put, rng):
    xp, x = backend.namespace, put(float32(rng, 3, 4))

    def derivative(x):
        return xp.sum(backend.value_and_grad(lambda x: xp.sum(ac.gelu(x, **EXACTLY)))(x)[1][0])

    with pytest.raises((NotImplementedError, LookupError, TypeError, RuntimeError), match=r"(?i)again|once|second"):
        backend.value_and_grad(derivative)(x)


@pytest.mark.needs("gradients")
def test_one_array_for_all_three_has_its_gradients_added_in_one_order(backend, put, get, rng):
    xp, x = backend.namespace, float32(rng, 1, 2, 9, 8)

    def loss(x):
        return xp.sum(attention(x, x, x, **EXACTLY) ** 2)

    def apart(query, key, value):
        return xp.sum(attention(query, key, value, **EXACTLY) ** 2)

    parts = get(backend.value_and_grad(apart)(put(x), put(x), put(x))[1])
    wanted = exact.round_to_float32(sum(part.astype(np.float64) for part in parts), NUMPY)
    same(get(backend.value_and_grad(loss)(put(x))[1][0]), wanted)


def test_sums_of_more_than_4096_terms_have_two_parts():
    query = np.zeros((1, 1, 3, 5, 2))
    grid = SimpleNamespace(operands=SimpleNamespace(query=query), xp=NUMPY)
    for side, length, carried in (
        (1, 4096, False),
        (1, 4097, True),
        (0, 1365, False),
        (0, 1366, True),
        (1, None, True),
    ):
        grid.lengths = (length, length)
        assert _slices.needs_carry(grid, side) is carried


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_numbers_outside_the_range_are_refused_and_numpy_scalars_accepted(name, rng):
    arrays = qkv(rng)
    for number in (1e-30, 1e30):
        with pytest.raises(ValueError, match=f"expected a {name} of 0, or from"):
            of_numpy(*arrays, **{name: number})
    same(of_numpy(*arrays, **{name: np.float64(0.5)}), of_numpy(*arrays, **{name: 0.5}))


def test_a_pooling_window_with_nan_is_nan(backend, put, get):
    x = put(np.asarray([[1, 5], [np.nan, 7], [2, -0.0]], np.float32))
    for mode in backend.modes:
        pooled = backend.compile(lambda x: reproducible.max_pool(x, xp=backend.namespace), mode=mode)
        np.testing.assert_array_equal(get(pooled(x)), [np.nan, 7])


def test_an_epsilon_too_small_for_float64_acts_like_zero(put, get):
    x = np.asarray([[2.0**100] * 4, [1e-3] * 4], np.float32)
    ones = np.ones(4, np.float32)
    parameters = ac.parameters.LayerNorm(put(ones), put(ones))
    found = get(ac.layer_norm(parameters, put(x), epsilon=1e-310, **EXACTLY))
    np.testing.assert_array_equal(found, 1.0)
