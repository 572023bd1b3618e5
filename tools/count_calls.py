"""Counts the Python calls that a small call of attention makes inside the packages of this repository.

``python tools/count_calls.py`` prints a table; with a name of a case, the functions that were called, most often first.
"""

import collections
import sys
from pathlib import Path

import numpy as np

from attention_core import scaled_dot_product_attention as attention

ROOT = str(Path(__file__).parents[1])
PACKAGES = ("attention_core", "attention_numpy", "attention_torch", "attention_jax", "attention_tensorflow")
SHAPE = (1, 2, 8, 4)


def count(function):
    """The functions of the repository's packages that one call runs, after a few that warm up."""
    called = collections.Counter()

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and any(f"/{package}/" in code.co_filename for package in PACKAGES):
            called[f"{code.co_filename.rpartition('/attention_')[2]}:{code.co_name}"] += 1

    for _ in range(3):
        function()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return called


def cases():
    """The calls by name. Those of PyTorch are left out where it is not installed."""
    x = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    yield "NumPy", lambda: attention(x, x, x)
    yield "NumPy, causal", lambda: attention(x, x, x, is_causal=True)
    yield "NumPy, blockwise", lambda: attention(x, x, x, implementation="blockwise")
    yield "NumPy, reproducible", lambda: attention(x, x, x, arithmetic="reproducible")
    try:
        import torch

        import attention_torch
    except ImportError:
        return
    y, z = torch.from_numpy(x), torch.randn(1, 8, 16)
    layer = attention_torch.EncoderLayer(channels=16, num_heads=2, inner=32, seed=0).eval()
    yield "PyTorch, fused", lambda: attention(y, y, y, implementation="fused")
    yield "PyTorch, auto, causal", lambda: attention(y, y, y, is_causal=True)
    yield "PyTorch, EncoderLayer", lambda: layer(z)


if __name__ == "__main__":
    for name, function in cases():
        called = count(function)
        print(f"{name:24} {sum(called.values()):5}")
        if name in sys.argv[1:]:
            for address, number in called.most_common():
                print(f"{number:8}  {address}")
