"""The other public functions against their formulas in extended precision, and random numbers against NumPy's bits."""

from __future__ import annotations

import math
from typing import Any

import fuzz_oracle as oracle
import numpy as np
import pytest
from fuzz_problems import numpy_dtype, wide_name
from hypothesis import strategies as st
from test_fuzz_bits import assert_same_bits

import attention_core as ac
from attention_core import initializers
from attention_core.backend import get_backend
from attention_core.parameters import Embeddings, FeedForward, GatedFeedForward, LayerNorm, Linear

NUMPY = get_backend("numpy")
LONG = oracle.LONG


class Formula:
    """Draws arrays, calls a function of the core, and has the truth with the scale of its errors."""

    def __init__(self, backend: Any, dtype: str, seed: int, arithmetic: str) -> None:
        self.rng, self.dtype, self.backend = np.random.default_rng(seed), dtype, backend
        self.arithmetic = arithmetic if dtype != "float64" else "fast"
        self.held: list[np.ndarray] = []

    def draw(self, *dims: int, size: float = 1.0) -> tuple[Any, np.ndarray]:
        """An array of the library, and the same numbers in extended precision."""
        array = (self.rng.standard_normal(dims) * size).astype(numpy_dtype(self.dtype))
        return self.backend.from_numpy(array), array.astype(LONG)

    def linear(self, rows: int, columns: int) -> tuple[Linear, Any]:
        (weight, w), (bias, b) = self.draw(rows, columns), self.draw(columns)
        return Linear(weight, bias), lambda x, scale: (x @ w + b, scale @ abs(w) + abs(b))


def erf(x: np.ndarray) -> np.ndarray:
    """By the C library, to a unit of float64."""
    return np.vectorize(math.erf, otypes=[float])(x.astype(float)).astype(LONG)


def _linear(f: Formula, dims: tuple[int, ...], rows: int, columns: int) -> Any:
    parameters, formula = f.linear(rows, columns)
    x, exact = f.draw(*dims, rows)
    return ac.functions.linear(parameters, x, arithmetic=f.arithmetic), *formula(exact, abs(exact))


def _gelu(f: Formula, dims: tuple[int, ...], rows: int, columns: int) -> Any:
    x, exact = f.draw(*dims, rows, size=1.5)
    return ac.functions.gelu(x, arithmetic=f.arithmetic), exact * (1 + erf(exact / np.sqrt(LONG(2)))) / 2, abs(exact)


def _feed_forward(f: Formula, dims: tuple[int, ...], rows: int, columns: int) -> Any:
    (expand, first), (contract, second) = f.linear(rows, columns), f.linear(columns, rows)
    x, exact = f.draw(*dims, rows, size=0.3)
    inner, size = first(exact, abs(exact))
    active = inner * (1 + erf(inner / np.sqrt(LONG(2)))) / 2
    return ac.functions.feed_forward(FeedForward(expand, contract), x, arithmetic=f.arithmetic), *second(
        active, 2 * size
    )


def _silu(f: Formula, dims: tuple[int, ...], rows: int, columns: int) -> Any:
    x, exact = f.draw(*dims, rows, size=3)
    return ac.functions.silu(x, arithmetic=f.arithmetic), exact / (1 + np.exp(-exact)), abs(exact)


def _gated_feed_forward(f: Formula, dims: tuple[int, ...], rows: int, columns: int) -> Any:
    (gate, first), (expand, second), (contract, third) = (
        f.linear(rows, columns),
        f.linear(rows, columns),
        f.linear(columns, rows),
    )
    x, exact = f.draw(*dims, rows, size=0.3)
    (gated, size), (inner, other) = first(exact, abs(exact)), second(exact, abs(exact))
    active = gated / (1 + np.exp(-gated))
    parameters = GatedFeedForward(gate, expand, contract)
    return ac.functions.gated_feed_forward(parameters, x, arithmetic=f.arithmetic), *third(
        active * inner, 4 * size * other
    )


def _layer_norm(f: Formula, dims: tuple[int, ...], rows: int, columns: int) -> Any:
    (scale, s), (offset, o), (x, exact) = f.draw(rows), f.draw(rows), f.draw(*dims, rows)
    centred = exact - exact.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + LONG(1e-3))
    magnitude = (abs(exact) + abs(exact).mean(axis=-1, keepdims=True)) / deviation
    wanted = centred / deviation * s + o
    size = magnitude * abs(s) * (1 + magnitude.max(axis=-1, keepdims=True, initial=0)) + abs(o)
    return ac.functions.layer_norm(LayerNorm(scale, offset), x, epsilon=1e-3, arithmetic=f.arithmetic), wanted, size


def _rms_norm(f: Formula, dims: tuple[int, ...], rows: int, columns: int) -> Any:
    (scale, s), (x, exact) = f.draw(rows), f.draw(*dims, rows, size=2.0 ** int(f.rng.integers(-9, 9)))
    wanted = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + LONG(1e-6)) * s
    return ac.functions.rms_norm(scale, x, epsilon=1e-6, arithmetic=f.arithmetic), wanted, abs(wanted)


def _rotary(f: Formula, dims: tuple[int, ...], rows: int, columns: int) -> Any:
    width = 2 * columns
    (x, exact), interleaved = f.draw(*dims, 2, 3, width), bool(f.rng.integers(2))
    places = f.rng.integers(0, 200, 3)
    angle = places[:, None] * (LONG(10000.0) ** (-2 * np.arange(columns).astype(LONG) / width))
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = (exact[..., ::2], exact[..., 1::2]) if interleaved else (exact[..., :columns], exact[..., columns:])
    turned = a * cos - b * sin, b * cos + a * sin
    wanted = np.stack(turned, axis=-1).reshape(exact.shape) if interleaved else np.concatenate(turned, axis=-1)
    length = np.sqrt(a * a + b * b)
    size = np.repeat(length, 2, axis=-1) if interleaved else np.concatenate([length, length], axis=-1)
    positions = f.backend.from_numpy(places.astype(np.int32))
    return (
        ac.functions.rotary_embedding(x, positions, interleaved=interleaved, arithmetic=f.arithmetic),
        wanted,
        4 * size,
    )


def _embed(f: Formula, dims: tuple[int, ...], rows: int, columns: int) -> Any:
    (token, t), (position, p), (segment, s) = f.draw(7, rows), f.draw(columns, rows), f.draw(2, rows)
    ids, segments = f.rng.integers(0, 7, (*dims, columns)), f.rng.integers(0, 2, (*dims, columns))
    put = f.backend.from_numpy
    found = ac.functions.embed_tokens(
        Embeddings(token, position, segment),
        put(ids.astype(np.int32)),
        segment_ids=put(segments.astype(np.int32)),
        arithmetic=f.arithmetic,
    )
    parts = t[ids], np.broadcast_to(p, (*dims, columns, rows)), s[segments]
    return found, sum(parts), sum(map(abs, parts))


def _heads(f: Formula, dims: tuple[int, ...], rows: int, columns: int) -> Any:
    x, exact = f.draw(*dims, 3, rows * columns)
    split = ac.split_heads(x, rows)
    np.testing.assert_array_equal(f.backend.to_numpy(ac.merge_heads(split)), f.backend.to_numpy(x))
    wanted = np.moveaxis(exact.reshape(*dims, 3, rows, columns), -2, -3)
    return split, wanted, np.zeros_like(wanted)


def _spectral_norm(f: Formula, dims: tuple[int, ...], rows: int, columns: int) -> Any:
    (weight, w), (vector, u) = f.draw(*dims, rows, columns), f.draw(columns)
    flat = w.reshape(-1, columns)
    v = flat @ u
    v = v / (np.sqrt((v * v).sum()) + LONG(1e-6))
    u = flat.T @ v
    u = u / (np.sqrt((u * u).sum()) + LONG(1e-6))
    sigma, size = v @ flat @ u, abs(v) @ abs(flat) @ abs(u)
    return (
        ac.functions.spectral_norm(weight, vector, epsilon=1e-6, arithmetic=f.arithmetic)[0],
        w / sigma,
        abs(w / sigma) * (8 + 40 * size / abs(sigma)) ** 2,
    )


FORMULAS = {
    each.__name__.strip("_"): each
    for each in (
        _linear,
        _gelu,
        _silu,
        _feed_forward,
        _gated_feed_forward,
        _layer_norm,
        _rms_norm,
        _rotary,
        _embed,
        _heads,
        _spectral_norm,
    )
}


@st.composite
def formulas(draw: Any, backend: Any) -> tuple[Any, ...]:
    """A function, a dtype, a seed, an arithmetic, and sizes."""
    dtypes = [name for name in ("float32", "float64", "float16", "bfloat16") if name in backend.dtypes]
    few = backend.name in ("jax", "tensorflow")
    dims = draw(st.sampled_from([(), (2,)] if few else [(), (2,), (3, 1), (0,)]))
    sizes = [draw(st.sampled_from([3, 5]) if few else st.integers(1, 9)) for _ in range(2)]
    return (
        draw(st.sampled_from(list(FORMULAS))),
        draw(st.sampled_from(dtypes)),
        draw(st.integers(0, 2**16)),
        draw(st.sampled_from(["fast", "reproducible"])),
        dims,
        sizes,
    )


def check_formula(case: tuple[Any, ...], backend: Any) -> str | None:
    name, dtype, seed, arithmetic, dims, sizes = case
    if name == "spectral_norm" and 0 in dims:
        return None
    formula = Formula(backend, dtype, seed, arithmetic)
    found, wanted, size = FORMULAS[name](formula, dims, *sizes)
    found = backend.to_numpy(found)
    assert found.dtype == numpy_dtype(dtype)
    assert found.shape == wanted.shape
    size = size.astype(float)
    allowed = (
        size * oracle.EPSILON[wide_name(dtype)] * (2 * max(sizes) + 16)
        + 0.51 * oracle.spacing(abs(wanted), dtype)
        + 1e-35
    )
    error = abs(found.astype(LONG) - wanted)
    assert (error <= allowed).all(), f"{float((error / allowed).max())} times the bound"
    return name


@st.composite
def draws(draw: Any) -> tuple[Any, ...]:
    """An initializer, a seed, a shape, and a dtype."""
    name = draw(st.sampled_from(initializers.__all__))
    matrix = name in ("glorot_uniform", "he_uniform", "lecun_normal")
    dims = draw(st.tuples(*[st.integers(1, 9)] * 2) if matrix else st.lists(st.integers(0, 5), max_size=3).map(tuple))
    seed = draw(
        st.integers(0, 2**64 - 1) | st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1))
    )
    return name, seed, dims, draw(st.sampled_from(["float32", "float64"]))


def check_draw(case: tuple[Any, ...], backend: Any) -> None:
    name, seed, dims, dtype = case

    def drawn(backend: Any) -> np.ndarray:
        drawn_seed = backend.from_numpy(np.asarray(seed, np.int32)) if isinstance(seed, tuple) else seed
        return backend.to_numpy(getattr(initializers, name)(drawn_seed, dims, dtype=dtype, xp=backend.namespace))

    found = drawn(backend)
    assert found.shape == dims
    assert_same_bits([found], [drawn(NUMPY)])
    if isinstance(seed, tuple):
        low, high = (word % 2**32 for word in seed)
        number = getattr(initializers, name)(low | high << 32, dims, dtype=dtype, xp=NUMPY.namespace)
        assert_same_bits([found], [NUMPY.to_numpy(number)])


@pytest.mark.cases(20)
def test_functions(fuzz, backend):
    fuzz(lambda case: check_formula(case, backend), formulas(backend))


@pytest.mark.cases(10)
def test_random(fuzz, backend):
    fuzz(lambda case: check_draw(case, backend), draws())
