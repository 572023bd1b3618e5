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

HELPERS = Path(__file__).parents[2] / "helpers"


def started(devices, *arguments):
    """A process with so many devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    return subprocess.Popen([sys.executable, str(HELPERS / "jax_ranks.py"), *map(str, arguments)], env=env)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "found"
    assert started(8, path).wait() == 0
    return pickle.loads(path.read_bytes())


def test_two_processes_of_two_devices_have_the_numbers_of_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [tmp_path / str(process) for process in (0, 1)]
    processes = [started(2, port, process, path) for process, path in enumerate(paths)]
    assert [each.wait() for each in processes] == [0, 0]
    first, second = (pickle.loads(path.read_bytes()) for path in paths)
    for strategy in ("gather", "ring"):
        for key, x in first["whole"].items():
            of_rows = key in ("output", "logsumexp")  # of which each process has those of its devices, and zeros
            both = first[strategy][key] + second[strategy][key] if of_rows else second[strategy][key]
            np.testing.assert_allclose(both, x, rtol=0, atol=1e-13 * np.max(np.abs(x)), err_msg=key)


def test_devices_have_the_numbers_of_one(found):
    cases = [case for case in found if isinstance(case, tuple)]
    assert len(cases) == 5
    for case in cases:
        joined, whole = found[case]
        assert joined.keys() == whole.keys()
        for key, x in whole.items():
            np.testing.assert_allclose(joined[key], x, rtol=0, atol=1e-13 * np.max(np.abs(x)), err_msg=key)


def test_gradients_of_devices_have_the_published_bits(found):
    sha256, published = found["published"]
    assert sha256 == published


def test_shards_are_computed_again_for_the_gradient(found):
    joined, whole = found["checkpoint"]
    for key, x in whole.items():
        np.testing.assert_allclose(joined[key], x, rtol=0, atol=1e-13 * np.max(np.abs(x)), err_msg=key)


def test_devices_that_share_a_cache_decode_in_the_bits_of_one(found):
    np.testing.assert_array_equal(*found["merge"])


def test_verified_calls_are_none_that_are_traced():
    x, everywhere = jnp.zeros((1, 2, 4, 3)), jax.P()
    attend = lambda x: ac.scaled_dot_product_attention(x, x, x, shards=ac.Shards("ranks", verify=True))  # noqa: E731
    over = jax.shard_map(attend, mesh=jax.make_mesh((1,), ("ranks",)), in_specs=everywhere, out_specs=everywhere)
    with pytest.raises(ValueError, match="expected verify of shards in calls that no compiler traces"):
        over(x)


def test_an_axis_outside_of_shard_map_is_named(found):
    assert found["outside"] == "expected the name of an axis under jax.shard_map; got 'ranks', which is none"
