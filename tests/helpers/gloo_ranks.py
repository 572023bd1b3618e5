"""What each process of a group of PyTorch does: a file of its own, as processes that are spawned import it."""

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from shard_helpers import EXACT, check_close, check_told, joined, of_rank, whole
from torch.distributed.device_mesh import DeviceMesh

import attention_core as ac
from attention_torch.collectives import TorchCollectives

CASES = [
    ("causal", 4, "zigzag", "gather", 13),
    ("array and rule", 2, "zigzag", "heads", 13),
    ("bias of bhmn", 4, "contiguous", "heads", 16),
    ("relative bias", 4, "zigzag", "gather", 16),
    ("everything", 4, "zigzag", "heads", 13),
    ("causal", 3, "zigzag", "ring", 13),
    ("bias of bhmn", 4, "contiguous", "ring", 13),
    ("window", 4, "contiguous", "ring", 32),
    ("sinks", 4, "zigzag", "merge", 13),
]


def run(rank, folder):
    """Compare all cases with one process, on the first rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    groups = {4: dist.group.WORLD, 3: dist.new_group([0, 1, 2]), 2: dist.new_group([0, 1])}
    for case in CASES:
        compare(rank, groups[case[1]], case)
    ways = (2, "zigzag", "heads"), (3, "contiguous", "gather"), (4, "zigzag", "gather"), (4, "zigzag", "merge")
    for turn, name in enumerate(EXACT[::2]):
        case = name, *ways[turn % 4], 13
        compare(rank, groups[case[1]], case, "reproducible", "float32")
    check_errors()
    compare(rank, DeviceMesh("cpu", torch.arange(4)), CASES[0])
    for split, strategy in (
        ("zigzag", "gather"),
        ("contiguous", "ring"),
    ):  # a compiler takes long, and so does each rank
        compare(rank, groups[2], ("causal", 2, split, strategy, 13), wrap=compiled)
    compare(rank, groups[4], CASES[0], wrap=checkpointed)
    if rank < 2:
        refuse_gradients(groups[2])
    of_two_groups(rank, [groups[4], dist.new_group([0, 1, 2, 3])])
    dist.barrier()
    lose_a_rank(rank, folder)


def refuse_gradients(group):
    """Each of two ranks is told of a differentiated merge, in each mode, before any sum over ranks."""
    shards, x, sums = ac.Shards(group, strategy="merge"), torch.ones(1, 2, 4, 3), []
    total = TorchCollectives.total
    TorchCollectives.total = lambda *arguments: (sums.append(1), total(*arguments))[1]
    for mode in ("eager", "compiled"):

        def loss(query):
            return ac.scaled_dot_product_attention(query, x, x, shards=shards).sum()

        wrapped, told = loss if mode == "eager" else compiled(loss), [None, None]
        try:
            wrapped(x[..., :1, :].clone().requires_grad_())
        except Exception as error:
            dist.all_gather_object(told, str(error), group=group)
        check_told(told, 2)
        assert not sums
    wrapped(x[..., :1, :])  # of which no gradient is recorded
    assert sums == [1]
    TorchCollectives.total = total


def of_two_groups(rank, groups):
    """Calls of two groups with inputs of their own: in alternation, and then from two threads."""
    cases = [("causal", 4, "zigzag", strategy, 13) for strategy in ("gather", "ring")]

    def call(turn, n):
        compare(rank, groups[n], cases[turn], seed=1 + 2 * turn + n)

    for turn, n in itertools.product((0, 1), repeat=2):
        call(turn, n)
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(lambda n=n: [call(turn, n) for turn in (0, 1)]) for n in (0, 1)]:
            each.result()


def lose_a_rank(rank, folder):
    """The last rank leaves a call out, and then dies, which is an error on each of the others."""
    groups = [dist.new_group(timeout=timedelta(seconds=limit)) for limit in (5, 60)]
    x = torch.zeros(1, 2, 4, 3)
    ac.scaled_dot_product_attention(x, x, x, shards=ac.Shards(groups[0]))
    for turn, (group, strategy) in enumerate(zip(groups, ("gather", "ring"), strict=True)):
        start = time.monotonic()
        while rank == 3 and len(list(Path(folder).glob("late*"))) < 3:
            time.sleep(0.05)
        if rank == 3 and turn == 0:
            continue
        if rank == 3:
            os._exit(0)
        with pytest.raises(RuntimeError):
            ac.scaled_dot_product_attention(x, x, x, shards=ac.Shards(group, strategy=strategy))
        assert time.monotonic() - start < 60  # by the limit of its group, not that of PyTorch; of the dead, before it
        Path(folder, f"late{rank}").touch()
    os._exit(0)  # a group that lost a rank is not left in order


def compare(rank, group, case, arithmetic="fast", dtype="float64", seed=0, **options):
    """Compare the results of the ranks, joined, with those of one process: on the first rank."""
    name, size, split, strategy, length = case
    if rank >= size:
        return
    backend = ac.backend.get_backend("torch")
    more = {"length": length, "arithmetic": arithmetic, "dtype": dtype, "seed": seed}
    ranks, mine = (
        [None] * size,
        of_rank(backend, ac.Shards(group, split, strategy, length), name, put=torch.from_numpy, **more, **options),
    )
    dist.all_gather_object(ranks, mine, group=group.get_group() if isinstance(group, DeviceMesh) else group)
    if rank:
        return
    is_merged = strategy == "merge"  # so that all ranks have the whole
    expected = whole(backend, name, put=torch.from_numpy, differentiate=not is_merged, **more)
    found = ranks[-1] if is_merged else joined(ranks, split, expected)
    check_close(found, expected, 1e-13 if arithmetic == "fast" else 0)


def compiled(loss):
    """A loss as one graph."""
    return torch.compile(loss, fullgraph=True, backend="aot_eager")


def checkpointed(loss):
    """A loss that is computed again for its gradient."""
    return lambda *arrays: torch.utils.checkpoint.checkpoint(loss, *arrays, use_reentrant=False)


def check_errors():
    """Groups that are none are named, in the same words on every rank."""
    x, every = torch.zeros(1, 2, 4, 3), [None] * 4
    expected = "TypeError: expected the group of shards as a ProcessGroup, or a DeviceMesh of one axis; got "
    wrong = {expected + type(group).__name__: group for group in (None, "axis", 4)}
    two_axes = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    wrong["ValueError: expected a DeviceMesh of one axis as the group of shards; got one of 2"] = two_axes
    for text, group in wrong.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            ac.scaled_dot_product_attention(x, x, x, shards=ac.Shards(group))
        dist.all_gather_object(every, f"{caught.type.__name__}: {caught.value}")
        assert every == [text] * 4
