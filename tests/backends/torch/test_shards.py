"""Processes of gloo that share a sequence: one start for all tests."""

import multiprocessing
import pickle

import numpy as np
import pytest
import torch
import torch.distributed
import torch.multiprocessing

import attention_core as ac

pytestmark = pytest.mark.needs("torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import gloo_ranks

    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.set_forkserver_preload(["gloo_ranks"])  # PyTorch is imported once for all ranks
    arguments = (str(folder / "store"), str(folder))
    torch.multiprocessing.start_processes(gloo_ranks.run, arguments, nprocs=4, start_method="forkserver")
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return pickle.loads((folder / "found").read_bytes())


def check(pair, most):
    joined, whole = pair
    assert joined.keys() == whole.keys()
    for key, x in whole.items():
        finite = np.isfinite(x)
        np.testing.assert_array_equal(joined[key][~finite], x[~finite])
        errors = np.where(finite, joined[key], 0) - np.where(finite, x, 0)
        assert np.max(np.abs(errors)) <= most * np.max(np.abs(np.where(finite, x, 0))), key


@pytest.mark.parametrize(
    ("kind", "count", "most"),
    [("numbers", 9, 1e-13), ("exact", 6, 0), ("alternation", 4, 1e-13), ("threads", 4, 1e-13)],
)
def test_processes_have_the_numbers_and_bits_of_one(found, kind, count, most):
    """Also two groups in one process, of which each has its own."""
    cases = [case for case in found if case[0] == kind]
    assert len(cases) == count
    for case in cases:
        check(found[case], most)


def test_a_rank_that_does_not_come_and_one_that_dies_are_errors_on_all_others(folder):
    for rank in range(3):
        late, dead = pickle.loads((folder / f"told{rank}").read_bytes())
        assert late[1] < 60  # by the limit of its group, not that of PyTorch
        assert dead[1] < 60  # before that of its group


@pytest.mark.parametrize("way", ["compiled", "compiled ring", "checkpoint", "mesh"])
def test_programs_checkpoints_and_meshes_have_the_numbers_of_one(found, way):
    check(found[way], 1e-13)


def test_a_differentiated_merge_is_refused_before_anything_is_sent(found):
    refused, sums = found["merge"]
    assert sums == 1
    for mode, (told, sums) in refused.items():
        assert sums == 0, mode
        assert told[0] == told[1]
        assert "expected strategy='merge' of shards, which is for decoding, not to be differentiated" in told[0]


@pytest.fixture
def alone():
    """A group of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("split", "strategy", "arithmetic"),
    [("zigzag", "gather", "reproducible"), ("zigzag", "ring", "fast"), ("contiguous", "ring", "fast")],
)
def test_a_plan_inside_of_another_is_compiled(alone, split, strategy, arithmetic):
    """A shard is padded or not, and a ring holds the plan of its blocks in its own. Of the last, a hop takes the kernel."""
    shards = ac.Shards(alone, split, strategy, 7)
    x = torch.arange(32, dtype=torch.float32).reshape(1, 1, 8, 4)[..., : 8 if split == "zigzag" else 7, :] / 16
    options = {"mask": ac.SlidingWindow(left=2, right=0), "arithmetic": arithmetic, "shards": shards}

    def attend(x):
        return ac.scaled_dot_product_attention(x, x, x, **options)

    compiled, most = torch.compile(attend, fullgraph=True, backend="eager"), 1e-6 if arithmetic == "fast" else 0
    torch.testing.assert_close(compiled(x), attend(x), rtol=0, atol=most)


@pytest.mark.parametrize("strategy", ["gather", "heads", "ring"])
def test_lengths_and_heads_that_became_symbols_are_compiled(alone, strategy):
    """In the second program of the same code, PyTorch has symbols for what differs."""
    for length, heads in ((7, 2), (9, 3)):
        shards, x = ac.Shards(alone, "zigzag", strategy, length), torch.ones(1, heads, length + 1, 4)

        def attend(x, shards=shards):
            return ac.scaled_dot_product_attention(x, x, x, is_causal=True, shards=shards)

        torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="eager")(x), attend(x))


def test_groups_that_are_none_are_named_on_every_rank(found):
    expected = "TypeError: expected the group of shards as a ProcessGroup, or a DeviceMesh of one axis; got "
    *wrong, two_axes = found["errors"]
    assert wrong == [expected + kind for kind in ("NoneType", "str", "int")]
    assert two_axes == "ValueError: expected a DeviceMesh of one axis as the group of shards; got one of 2"
