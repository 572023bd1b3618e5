"""Processes of gloo that share a sequence: one start for all tests."""

import pickle

import numpy as np
import pytest
import torch.multiprocessing

pytestmark = pytest.mark.needs("torch")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    import gloo_ranks

    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(gloo_ranks.run, args=(str(folder / "store"), str(folder)), nprocs=4)
    return pickle.loads((folder / "found").read_bytes())


def check(pair, most):
    joined, whole = pair
    assert joined.keys() == whole.keys()
    for key, x in whole.items():
        finite = np.isfinite(x)
        np.testing.assert_array_equal(joined[key][~finite], x[~finite])
        errors = np.where(finite, joined[key], 0) - np.where(finite, x, 0)
        assert np.max(np.abs(errors)) <= most * np.max(np.abs(np.where(finite, x, 0))), key


def test_processes_have_the_numbers_of_one(found):
    cases = [case for case in found if isinstance(case, tuple) and case[0] != "exact"]
    assert len(cases) == 8
    for case in cases:
        check(found[case], 1e-13)


def test_processes_have_the_bits_of_one(found):
    cases = [case for case in found if case[0] == "exact"]
    assert len(cases) == 33
    for case in cases:
        check(found[case], 0)


def test_a_mesh_of_one_axis_is_a_group(found):
    check(found["mesh"], 1e-13)


@pytest.mark.parametrize("way", ["compiled", "checkpoint"])
def test_shards_in_one_graph_and_computed_again_for_the_gradient(found, way):
    check(found[way], 1e-13)


def test_groups_that_are_none_are_named_on_every_rank(found):
    expected = "TypeError: expected the group of shards as a ProcessGroup, or a DeviceMesh of one axis; got "
    *wrong, two_axes = found["errors"]
    assert wrong == [expected + kind for kind in ("NoneType", "str", "int")]
    assert two_axes == "ValueError: expected a DeviceMesh of one axis as the group of shards; got one of 2"
