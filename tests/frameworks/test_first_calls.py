"""The first calls of a process: what they import, and that they warn of nothing, compiled by their framework or not."""

import functools
import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
{imports}
x = {ones}((1, 2, 16, 8))
before = set(sys.modules)
from attention_core import scaled_dot_product_attention
attend = lambda x: scaled_dot_product_attention(x, x, x, is_causal=True)
attend(x)
print(*sorted(set(sys.modules) - before))
{compiled}
"""
SCRIPTS = {
    "numpy": ("import numpy", "numpy.ones", ""),
    "torch": ("import torch", "torch.ones", 'torch.compile(attend, fullgraph=True, backend="eager")(x)'),
    "jax": ("import jax", "jax.numpy.ones", "jax.jit(attend)(x)"),
    "tensorflow": ("import tensorflow as tf", "tf.ones", "tf.function(attend)(x)"),
}
# Compilers, what is for accelerators or layers or files alone, and the other libraries.
HEAVY = {
    "torch._dynamo",
    "torch._inductor",
    "torch.nn.attention.flex_attention",
    "torch.distributed",
    "sympy",
    "jax.experimental.pallas",
    "jax._src.pallas",
    *("torch", "jax", "tensorflow", "keras", "flax", "transformers"),
    *("safetensors", "gguf", "tokenizers", "matplotlib", "hypothesis"),
    *(
        "attention_dask",
        "attention_keras",
        "attention_view",
        "attention_conformance",
        "attention_cli",
        "attention_benchmark",
        "attention_workers",
    ),
}


@functools.cache
def first_calls(library):
    imports, ones, compiled = SCRIPTS[library]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", SCRIPT.format(imports=imports, ones=ones, compiled=compiled)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment)


@pytest.mark.needs(lambda backend: backend.name in SCRIPTS)
def test_the_first_eager_call_imports_nothing_heavy(backend):
    loaded = set(first_calls(backend.name).stdout.split())
    assert f"attention_{backend.name}" in loaded
    assert not HEAVY & loaded


@pytest.mark.needs(lambda backend: backend.name in SCRIPTS)
def test_the_first_call_warns_of_nothing(backend):
    ended = first_calls(backend.name)
    told = [line for line in ended.stderr.splitlines() if not line.startswith(("WARNING: All log", "I0000", "W0000"))]
    assert not [line for line in told if "arn" in line or "AutoGraph" in line or "lru_cache" in line], ended.stderr
