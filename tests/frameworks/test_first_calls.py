"""The first call of a process, compiled by its framework, prints no warning."""

import os
import subprocess
import sys

import pytest

SCRIPTS = {
    "torch": """
import torch
from attention_core import scaled_dot_product_attention
x = torch.ones(1, 2, 16, 8)
torch.compile(lambda x: scaled_dot_product_attention(x, x, x, is_causal=True), fullgraph=True, backend="eager")(x)
""",
    "tensorflow": """
import tensorflow as tf
from attention_core import scaled_dot_product_attention
x = tf.ones((1, 2, 16, 8))
tf.function(lambda x: scaled_dot_product_attention(x, x, x, is_causal=True))(x)
""",
    "jax": """
import jax
from attention_core import scaled_dot_product_attention
x = jax.numpy.ones((1, 2, 16, 8))
jax.jit(lambda x: scaled_dot_product_attention(x, x, x, is_causal=True))(x)
""",
}


@pytest.mark.needs(lambda backend: backend.name in SCRIPTS)
def test_the_first_call_warns_of_nothing(backend):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", SCRIPTS[backend.name]]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    told = [line for line in ended.stderr.splitlines() if not line.startswith(("WARNING: All log", "I0000", "W0000"))]
    assert not [line for line in told if "arn" in line or "AutoGraph" in line or "lru_cache" in line], ended.stderr
