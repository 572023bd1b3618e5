"""Devices of JAX that share a sequence: one process with eight of them, for all tests."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_core as ac
from attention_conformance import check_same_call

HELPERS = Path(__file__).parents[2] / "helpers"


def started(devices, *arguments):
    """A process with so many devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env = os.environ | {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.Popen([sys.executable, str(HELPERS / "jax_ranks.py"), *map(str, arguments)], env=env)


def test_two_processes_of_two_devices_have_the_numbers_of_one(tmp_path):
    paths = [tmp_path / str(process) for process in (0, 1)]
    with socket.socket() as kept:  # so that no other process is given the port, which the coordinator shares
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(("127.0.0.1", 0))
        processes = [started(2, kept.getsockname()[1], process, path) for process, path in enumerate(paths)]
        assert [each.wait() for each in processes] == [0, 0]
    first, second = (pickle.loads(path.read_bytes()) for path in paths)
    for strategy in ("gather", "ring"):
        for key, x in first["whole"].items():
            of_rows = key in ("output", "logsumexp")  # of which each process has those of its devices, and zeros
            both = first[strategy][key] + second[strategy][key] if of_rows else second[strategy][key]
            np.testing.assert_allclose(both, x, rtol=0, atol=1e-13 * np.max(np.abs(x)), err_msg=key)


def test_eight_devices_have_the_numbers_and_bits_of_one():
    """Also where shards are computed again for the gradient; a cache that they share decodes in the bits of one."""
    assert started(8).wait() == 0


def test_calls_that_are_traced_are_not_compared():
    x = jnp.zeros((1, 2, 4, 3))
    with pytest.raises(ValueError):
        jax.jit(lambda x: check_same_call(ac.Shards("ranks"), x, x, x))(x)
