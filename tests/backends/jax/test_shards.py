"""Devices of JAX that share a sequence: one process with eight of them, for all tests."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HELPERS = Path(__file__).parents[2] / "helpers"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "found"
    flags = "--xla_force_host_platform_device_count=8"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    subprocess.run([sys.executable, str(HELPERS / "jax_ranks.py"), str(path)], check=True, env=env)
    return pickle.loads(path.read_bytes())


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


def test_devices_that_share_a_cache_decode_in_the_bits_of_one(found):
    np.testing.assert_array_equal(*found["merge"])


def test_an_axis_outside_of_shard_map_is_named(found):
    assert found["outside"] == "expected the name of an axis under jax.shard_map; got 'ranks', which is none"
