"""Replicas of TensorFlow that share a sequence: one process with two logical processors, for all tests."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).parents[2] / "helpers" / "tensorflow_ranks.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "found"
    subprocess.run([sys.executable, str(PROGRAM), str(path)], check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    return pickle.loads(path.read_bytes())


def test_replicas_have_the_numbers_and_the_bits_of_one_device(found):
    cases = [case for case in found if isinstance(case, tuple)]
    assert len(cases) == 6
    for case in cases:
        joined, whole = found[case]
        assert joined.keys() == whole.keys()
        for key, x in whole.items():
            most = 0 if "reproducible" in case else 1e-13 * np.max(np.abs(x))
            np.testing.assert_allclose(joined[key], x, rtol=0, atol=most, err_msg=key)


def test_replicas_in_one_graph_have_the_gradients_of_one_device(found):
    ranks, whole = found["graph"]
    for rank in ranks:
        for gathered, x in zip(rank, whole, strict=True):
            np.testing.assert_allclose(gathered, x, rtol=0, atol=1e-13 * np.max(np.abs(x)))


def test_what_is_no_strategy_and_what_would_send_are_named_on_every_replica(found):
    no_group, outside, *sent = found["errors"]
    assert no_group == "expected the group of shards as a tf.distribute.Strategy; got str"
    assert outside == "expected a call with shards inside of MirroredStrategy.run; got one outside"
    assert len(sent) == 4
    for each in sent:
        assert each.endswith("ranks of tensorflow cannot send to each other: 'gather' has the same numbers")


def test_a_differentiated_merge_is_refused_on_every_replica(found):
    first, second = found["differentiated"]
    assert first == second
    assert first.startswith("expected strategy='merge' of shards, which is for decoding, not to be differentiated")
