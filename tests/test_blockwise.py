"""Attention over blocks is attention: the same numbers and gradients, in less memory."""

import contextlib
import dataclasses
import importlib
import math
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

import attention_core as ac
from attention_core import ScoreMod, _blockwise
from attention_core.backend import Tuning
from attention_core.masks import Mask, outline, rebuilt, slots

attention = ac.scaled_dot_product_attention
A, B, H, G, M, N, D, E = 2, 3, 4, 2, 11, 13, 5, 6  # all axes tell each other apart but A and G
BLOCKS = 4, 5  # neither length is a multiple


@pytest.fixture(autouse=True)
def small(backend, monkeypatch):
    """Blocks so small that there are several, none of which the lengths fill."""
    monkeypatch.setattr(backend, "tuning", Tuning(BLOCKS, heads_apart=False, dense_below=0))


@pytest.fixture
def quick(backend):
    """On JAX, loops that are not compiled, which takes seconds for each: `test_compiled_blocks` compiles a few."""
    with importlib.import_module("jax").disable_jit() if backend.name == "jax" else contextlib.nullcontext():
        yield


@pytest.fixture
def differentiable(backend):
    if not backend.differentiates:
        pytest.skip(f"{backend.name} does not differentiate")
    return backend


def qkv(rng, leading=(B,), heads=H, groups=G, rows=M, columns=N):
    shapes = (*leading, heads, rows, D), (*leading, groups, columns, D), (*leading, groups, columns, E)
    return [rng.standard_normal(shape) for shape in shapes]


def both(backend, options, arrays, dtype=None):
    """Output, logsumexp and all gradients of the dense form and of blocks; options are made of the arrays after three.

    The gradients with respect to the numbers by which the results are multiplied are the results themselves.
    """
    xp, put = backend.namespace, backend.from_numpy
    rng = np.random.default_rng(61)
    query, _, value = arrays[:3]
    cotangents = rng.standard_normal((*query.shape[:-1], value.shape[-1])), rng.standard_normal(query.shape[:-1])

    def run(implementation, *arrays):
        return attention(
            *arrays[:3], **options(*arrays[3:]), return_logsumexp=True, implementation=implementation, xp=xp
        )

    if not backend.differentiates:
        given = put(tuple(arrays), dtype=dtype)
        return [backend.to_numpy(tuple(run(name, *given))[::2]) for name in ("dense", "blockwise")]

    def gradients(implementation):
        def measure(of_output, of_logsumexp, *arrays):
            output, _, logsumexp = run(implementation, *arrays)
            logsumexp = xp.where(xp.isfinite(logsumexp), logsumexp, 0.0)
            parts = xp.multiply(xp.astype(output, of_output.dtype), of_output), xp.multiply(logsumexp, of_logsumexp)
            return xp.add(*(xp.astype(xp.sum(part), xp.float32) for part in parts))

        given = put((*cotangents, *arrays), dtype=dtype)
        return backend.to_numpy(backend.value_and_grad(measure)(*given)[1])

    return [gradients(name) for name in ("dense", "blockwise")]


def assert_equal(backend, options, arrays, dtype=None, close=1e-13):
    dense, blocks = both(backend, options, arrays, dtype)
    for expected, found in zip(dense, blocks, strict=True):
        if expected is None or not np.issubdtype(expected.dtype, np.floating):
            continue
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        scale = max(1.0, float(np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))))
        np.testing.assert_allclose(found, expected, rtol=0, atol=close * scale)


OFFSETS, LENGTHS = np.array([0, 3, -4]), np.array([13, 0, 6])
QUERY_IDS, KEY_IDS = np.sort(np.random.default_rng(7).integers(0, 4, (2, B, N)))
MASKS = {
    "full": (lambda: {}, ()),
    "causal": (lambda: {"is_causal": True}, ()),
    "causal, later": (lambda: {"mask": ac.Causal(2)}, ()),
    "causal, empty rows": (lambda: {"mask": ac.Causal(-5)}, ()),
    "causal, offsets": (lambda offset: {"mask": ac.Causal(offset)}, (OFFSETS,)),
    "window": (lambda: {"mask": ac.SlidingWindow(left=2, right=1)}, ()),
    "window, one-sided": (lambda offset: {"mask": ac.SlidingWindow(left=3, offset=offset)}, (OFFSETS,)),
    "lengths": (lambda lengths: {"mask": ac.KeyLengths(lengths)}, (LENGTHS,)),
    "segments": (lambda query, key: {"mask": ac.Segments(query, key)}, (QUERY_IDS[:, :M], KEY_IDS)),
    "segments, shared": (lambda query, key: {"mask": ac.Segments(query, key)}, (QUERY_IDS[0, :M], KEY_IDS[1])),
    "function": (lambda: {"mask": ac.MaskFunction(lambda b, h, q, k: (q + 2 * k + h + b) % 3 > 0)}, ()),
    "and": (lambda lengths: {"mask": ac.KeyLengths(lengths) & ac.Causal(1)}, (LENGTHS,)),
    "or": (lambda lengths: {"mask": ac.And(ac.Causal(-3) | ac.KeyLengths(lengths), ac.Causal(6))}, (LENGTHS,))
    if hasattr(ac, "And")
    else (lambda lengths: {"mask": (ac.Causal(-3) | ac.KeyLengths(lengths)) & ac.Causal(6)}, (LENGTHS,)),
    "not": (lambda offset: {"mask": ~ac.SlidingWindow(left=4, right=4, offset=offset)}, (OFFSETS,)),
    "one of two with entries": (
        lambda lengths: {"mask": ac.KeyLengths(lengths) & ac.MaskFunction(lambda b, h, q, k: k != q)},
        (LENGTHS,),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_blocks_give_what_all_scores_at_once_give(name, quick, backend, rng):
    options, arrays = MASKS[name]
    assert_equal(backend, options, [*qkv(rng), *arrays])
