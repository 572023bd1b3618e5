"""Processes of gloo that share a sequence, and programs of a group of one."""

import multiprocessing

import gloo_ranks
import pytest
import torch
import torch.distributed
import torch.multiprocessing

import attention_core as ac

pytestmark = pytest.mark.needs("torch")


def test_processes_have_the_numbers_and_bits_of_one_and_the_same_errors(tmp_path):
    """Each case is compared by the first process."""
    multiprocessing.set_forkserver_preload(["gloo_ranks"])  # PyTorch is imported once for all ranks
    torch.multiprocessing.start_processes(gloo_ranks.run, (str(tmp_path),), nprocs=4, start_method="forkserver")


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
