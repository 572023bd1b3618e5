"""Reproducible arithmetic of numbers that are not finite, of refused arguments, and in layers."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
import pytest
from layer_helpers import CASES, definition_of, perturbed
from reproducible_helpers import EXACTLY, LAYERS, B, E, H, M, N, float32, of_numpy, qkv, same

import attention_core as ac
from attention_core import scaled_dot_product_attention as attention
from attention_core._attention.blocks import plan


def test_attended_infinities_have_the_bits_of_numpy(put, get, rng):
    """Of either sign, and of both together, which are nan whatever the processor."""
    query, key, value = (float32(rng, 1, 1, 4, 4) for _ in range(3))
    value[0, 0, 1, :2], value[0, 0, 2, 1] = np.inf, -np.inf
    mask = np.tril(np.ones((4, 4), dtype=bool))
    found = get(attention(*put([query, key, value]), mask=put(mask), **EXACTLY))
    same(found, of_numpy(query, key, value, mask=mask))
    assert (found[0, 0, 1:, 0] == np.inf).all()
    assert np.isnan(found[0, 0, 2:, 1]).all()


def test_subnormal_numbers_are_zero_even_where_products_are_not(put, get):
    x, weight = np.full((1, 2), 1e-40, dtype=np.float32), np.full((2, 1), 1e10, dtype=np.float32)
    found = get(ac.functions.linear(ac.parameters.Linear(put(weight)), put(x), **EXACTLY))
    same(found, np.zeros((1, 1), dtype=np.float32))


def test_a_pair_is_not_finite_where_one_of_its_channels_is_not(put, get):
    x = np.ones((1, 5, 6), dtype=np.float32)
    x[0, 0, 0], x[0, 1, 2], x[0, 2, 1] = np.inf, -np.inf, np.nan
    kept = np.asarray([-0.0, 1e-40, np.inf, -np.inf, 1.0], dtype=np.float32)
    x[0, :, 4], x[0, :, 5] = kept, -kept
    found = get(ac.functions.rotary_embedding(put(x), put(np.arange(5)), width=4, **EXACTLY))
    for row, hit in enumerate(([0, 2], [0, 2], [1, 3], [], [])):
        np.testing.assert_array_equal(np.flatnonzero(np.isnan(found[0, row, :4])), hit)
    same(np.ascontiguousarray(found[..., 4:]), np.ascontiguousarray(x[..., 4:]))


def test_a_row_to_normalize_is_not_finite_where_one_of_its_channels_is_not(put, get):
    x, scale = np.ones((4, 3), dtype=np.float32), np.asarray([1.0, -2.0, np.inf], dtype=np.float32)
    x[0, 0], x[1, 1], x[3] = np.inf, np.nan, 0.0
    with np.errstate(invalid="ignore"):  # of 0 * inf
        found = get(ac.functions.rms_norm(put(scale), put(x), epsilon=1e-35, **EXACTLY))
    assert np.isnan(found[:2]).all()
    np.testing.assert_array_equal(found[2:], np.asarray([[1, -2, np.inf], [0, 0, np.nan]], dtype=np.float32))


@pytest.mark.needs("gradients")
@pytest.mark.parametrize("name", ["linear", "layer_norm", "rms_norm"])
def test_parameters_that_no_row_uses_have_a_gradient_of_zero(name, backend, rng):
    x, weight = backend.from_numpy((float32(rng, 0, 8), float32(rng, 8, 8)))
    _, (of_x, of_weight) = backend.value_and_grad(
        lambda x, weight: backend.namespace.sum(LAYERS[name](x, weight, **EXACTLY))
    )(x, weight)
    assert of_x.shape == (0, 8)
    same(backend.to_numpy(of_weight), np.zeros((8, 8), dtype=np.float32))


def test_a_device_without_float64_is_refused():
    class Somewhere(np.ndarray):
        device = "mps:0"

    x = np.ones((1, 2, 3), np.float32).view(Somewhere)
    with pytest.raises(ValueError, match="on a device that has float64"):
        attention(x, x, x, **EXACTLY)


@pytest.mark.parametrize("name", [name for name in CASES if hasattr(definition_of(name), "arithmetic")])
def test_layers_take_the_setting(name, backend):
    settings, inputs, options = CASES[name]
    definition = definition_of(name)(**settings)
    exact = dataclasses.replace(definition, **EXACTLY)
    (tree, state), inputs = perturbed(exact), [x.astype(np.float32) if x.dtype == np.float64 else x for x in inputs]
    options = options | ({"seed": 5} if "dropout" in settings else {})

    def computed(layer, put):
        placed = {key: put(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
        return layer(*put((tree, *inputs)), **placed, **({"state": put(state)} if state else {}))

    found = backend.to_numpy(computed(exact, backend.from_numpy))
    same(found, computed(exact, lambda x: x))
    np.testing.assert_allclose(found, computed(definition, lambda x: x), rtol=1e-4, atol=1e-5)


@pytest.mark.needs("gradients", lambda dims, backend: not backend.loops.traced or dims in ((B, H, M, N), (1, 1, 1, N)))
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
def test_gradients_of_small_values_do_not_depend_on_the_keys_that_fill_up_a_block(backend, monkeypatch):
    """Zeros that a compiler's blocks end with must not pass for values that are larger than the others."""
    rng, xp = np.random.default_rng(581), backend.namespace
    arrays = [float32(rng, 1, 1, *dims) * size for dims, size in (((3, 4), 1), ((5, 4), 4), ((5, 3), 0.01))]
    factor = backend.from_numpy(float32(rng, 1, 1, 3, 3))

    def gradients(keys):
        monkeypatch.setattr(plan, "_reproducible_block_sizes", lambda *_: (3, keys))

        def loss(*arrays):
            return xp.sum(attention(*arrays, implementation="blockwise", **EXACTLY) * factor)

        return backend.to_numpy(backend.value_and_grad(loss)(*backend.from_numpy(arrays))[1])

    for padded, whole in zip(gradients(3), gradients(5), strict=True):
        same(padded, whole)


@pytest.mark.needs("gradients")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: ac.functions.gelu(x, **EXACTLY),
        lambda x: attention(x, x, x, is_causal=True, **EXACTLY),
        lambda x: attention(x, x, x, is_causal=True, implementation="blockwise"),
    ],
    ids=["gelu", "reproducible", "blocks"],
)
def test_reproducible_arithmetic_and_blocks_are_differentiated_once(function, backend, put, rng):
    xp, x = backend.namespace, put(float32(rng, 1, 3, 4))

    def derivative(x):
        gradient = backend.value_and_grad(lambda x: xp.sum(xp.square(function(x))))(x)[1][0]
        return xp.sum(xp.square(gradient))

    second, more = backend.value_and_grad(derivative), []
    if backend.name == "jax":  # whose traces tell it before anything is compiled
        jax = importlib.import_module("jax")
        second, more = jax.jit(second), [jax.jit(jax.hessian(lambda x: xp.sum(function(x))))]
    for each in (second, *more):
        with pytest.raises(NotImplementedError):
            each(x)


@pytest.mark.needs("gradients")
def test_one_array_for_all_three_has_its_gradients_added_in_one_order(backend, put, get, rng):
    xp, x = backend.namespace, float32(rng, 1, 2, 9, 8)

    def loss(x):
        return xp.sum(attention(x, x, x, **EXACTLY) ** 2)

    def apart(query, key, value):
        return xp.sum(attention(query, key, value, **EXACTLY) ** 2)

    parts = get(backend.value_and_grad(apart)(put(x), put(x), put(x))[1])
    wanted = sum(part.astype(np.float64) for part in parts).astype(np.float32)
    same(get(backend.value_and_grad(loss)(put(x))[1][0]), wanted)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_numbers_outside_the_range_are_refused_and_numpy_scalars_accepted(name, rng):
    arrays = qkv(rng)
    for number in (1e-30, 1e30):
        with pytest.raises(ValueError):
            of_numpy(*arrays, **{name: number})
    same(of_numpy(*arrays, **{name: np.float64(0.5)}), of_numpy(*arrays, **{name: 0.5}))


def test_a_pooling_window_with_nan_is_nan(backend, put, get):
    """Which all queries attend to."""
    x, maps = np.ones((4, 4, 2), np.float32), [ac.parameters.Linear(np.ones((2, 2), np.float32))] * 3
    x[1, 0, 0] = np.nan
    parameters = put(ac.parameters.SaganAttention(*maps, None, np.float32([1])))
    for mode in backend.modes:
        pooled = backend.compile(lambda x: ac.functions.sagan_attention(parameters, x, **EXACTLY), mode=mode)
        assert np.isnan(get(pooled(put(x)))).all()


def test_an_epsilon_too_small_for_float64_acts_like_zero(put, get):
    x = np.asarray([[2.0**100] * 4, [1e-3] * 4], np.float32)
    ones = np.ones(4, np.float32)
    parameters = ac.parameters.LayerNorm(put(ones), put(ones))
    found = get(ac.functions.layer_norm(parameters, put(x), epsilon=1e-310, **EXACTLY))
    np.testing.assert_array_equal(found, 1.0)
    zeros = put(np.zeros((2, 4), np.float32))
    assert not get(ac.functions.rms_norm(put(ones), zeros, epsilon=1e-320, **EXACTLY)).any()
