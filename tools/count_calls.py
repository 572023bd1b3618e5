"""Counts the Python calls that a small call of attention makes inside the packages of this repository.

``python tools/count_calls.py`` prints a table: calls, their files, and how often a
call is in another file than the one before. With a name of a case, it prints the functions in the order of the calls.
"""

import sys
from pathlib import Path

import numpy as np

from attention_core import layers, scaled_dot_product_attention as attention
from attention_core.masks import KeyLengths

ROOT = str(Path(__file__).parents[1])
PACKAGES = ("attention_core", "attention_numpy", "attention_torch", "attention_jax", "attention_tensorflow")
SHAPE = (1, 2, 8, 4)


def calls_of(function):
    """Depth, file and name of the functions of the repository's packages that one call runs, after a few before it."""
    called, depth = [], 0

    def profile(frame, event, _):
        nonlocal depth
        code = frame.f_code
        if not any(f"/{package}/" in code.co_filename for package in PACKAGES):
            return
        if event == "call":
            called.append((depth, code.co_filename.rpartition("/attention_")[2], code.co_qualname))
        depth += {"call": 1, "return": -1}.get(event, 0)

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
    decoder = layers.DecoderLayer(16, 2, 32)
    parameters, h = decoder.init(0, xp=np), np.ones((1, 8, 16), dtype=np.float32)
    yield "NumPy", lambda: attention(x, x, x)
    yield "NumPy, causal", lambda: attention(x, x, x, is_causal=True)
    yield "NumPy, one query, lengths", lambda: attention(x[:, :, :1], x, x, mask=KeyLengths(np.asarray([5])))
    yield "NumPy, blockwise", lambda: attention(x, x, x, implementation="blockwise")
    yield "NumPy, reproducible", lambda: attention(x, x, x, arithmetic="reproducible")
    yield "NumPy, `DecoderLayer`", lambda: decoder(parameters, h)
    try:
        import torch

        import attention_torch
    except ImportError:
        return
    y, z = torch.from_numpy(x), torch.randn(1, 8, 16)
    layer = attention_torch.EncoderLayer(channels=16, num_heads=2, inner=32, seed=0).eval()
    yield "PyTorch, fused", lambda: attention(y, y, y, implementation="fused")
    yield "PyTorch, causal", lambda: attention(y, y, y, is_causal=True)
    yield "PyTorch, `EncoderLayer` in evaluation", lambda: layer(z)


if __name__ == "__main__":
    print("| call | Python calls | files | changes of file |\n|---|---|---|---|")
    for name, function in cases():
        called = calls_of(function)
        files = [file for _, file, _ in called]
        changes = sum(map(str.__ne__, files, files[1:]))
        print(f"| {name} | {len(files)} | {len(set(files))} | {changes} |")
        if name in sys.argv[1:]:
            for depth, file, function_name in called:
                print(f"{'  ' * depth}{file}:{function_name}")
