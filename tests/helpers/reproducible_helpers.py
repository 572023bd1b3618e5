"""Rounding, random numbers and comparisons of bits for reproducible arithmetic."""

from __future__ import annotations

import numpy as np

import attention_core as ac
from attention_core import scaled_dot_product_attention as attention
from attention_core._backend._find import backend_of
from attention_core.backend import get_backend

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


def positions(x):
    xp = backend_of(x).namespace if backend_of(x) else NUMPY
    return xp.arange(x.shape[-2], dtype=xp.int32)


LAYERS = {
    "rms_norm": lambda x, w, **o: ac.functions.rms_norm(w[:, 0], x, **o),
    "rotary": lambda x, w, **o: ac.functions.rotary_embedding(x, positions(x), **o),
    "linear": lambda x, w, **o: ac.functions.linear(ac.parameters.Linear(w), x, **o),
    "layer_norm": lambda x, w, **o: ac.functions.layer_norm(ac.parameters.LayerNorm(w[:, 0], w[:, 1]), x, **o),
    "gelu": lambda x, w, **o: ac.functions.gelu(x, **o),
    "silu": lambda x, w, **o: ac.functions.silu(x, **o),
    "spectral_norm": lambda x, w, **o: ac.functions.spectral_norm(w, w[0, :], **o)[0],
}
