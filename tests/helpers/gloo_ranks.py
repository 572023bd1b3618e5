"""What each process of a group of PyTorch does: a file of its own, as processes that are spawned import it."""

import os
import pickle
import time
from datetime import timedelta
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from shard_helpers import EXACT, joined, of_rank, whole
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


def run(rank, store, folder):
    """Run all cases, and write what rank 0 found into a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    groups = {4: dist.group.WORLD, 3: dist.new_group([0, 1, 2]), 2: dist.new_group([0, 1])}
    found = {}
    for case in CASES:
        found["numbers", case] = compared(rank, groups[case[1]], case, "fast", "float64")
    ways = (2, "zigzag", "heads"), (3, "contiguous", "gather"), (4, "zigzag", "gather"), (4, "zigzag", "merge")
    for turn, name in enumerate(EXACT[::2]):
        case = name, *ways[turn % 4], 13
        found["exact", case] = compared(rank, groups[case[1]], case, "reproducible", "float32")
    found["errors"] = errors(rank)
    found["mesh"] = compared(rank, DeviceMesh("cpu", torch.arange(4)), CASES[0], "fast", "float64")
    two = ("causal", 2, "zigzag", "gather", 13)  # a compiler takes long, and so does each rank
    found["compiled"] = compared(rank, groups[2], two, "fast", "float64", wrap=compiled)
    ring = ("causal", 2, "contiguous", "ring", 13)
    found["compiled ring"] = compared(rank, groups[2], ring, "fast", "float64", wrap=compiled)
    found["checkpoint"] = compared(rank, groups[4], CASES[0], "fast", "float64", wrap=checkpointed)
    found["merge"] = undifferentiated(rank, groups[2])
    found |= of_two_groups(rank, [groups[4], dist.new_group([0, 1, 2, 3])])
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(found))
    dist.barrier()
    lose_a_rank(rank, folder)


def undifferentiated(rank, group):
    """What each of two ranks is told of a differentiated merge, by mode, and how many sums over ranks were made."""
    shards, x, sums = ac.Shards(group, strategy="merge"), torch.ones(1, 2, 4, 3), []
    if rank > 1:
        return None
    total, found = TorchCollectives.total, {}
    TorchCollectives.total = lambda *arguments: (sums.append(1), total(*arguments))[1]
    for mode in ("eager", "compiled"):

        def loss(query):
            return ac.scaled_dot_product_attention(query, x, x, shards=shards).sum()

        wrapped, told = loss if mode == "eager" else compiled(loss), [None, None]
        try:
            wrapped(x[..., :1, :].clone().requires_grad_())
        except Exception as error:
            dist.all_gather_object(told, str(error), group=group)
        found[mode] = told, len(sums)
    wrapped(x[..., :1, :])  # of which no gradient is recorded
    TorchCollectives.total = total
    return found, len(sums)


def of_two_groups(rank, groups):
    """Calls of two groups with inputs of their own: in alternation, and then from two threads."""
    cases = [("causal", 4, "zigzag", strategy, 13) for strategy in ("gather", "ring")]
    found = {}

    def call(way, turn, n):
        found[way, turn, n] = compared(rank, groups[n], cases[turn], "fast", "float64", seed=1 + 2 * turn + n)

    for turn in (0, 1):
        for n in (0, 1):
            call("alternation", turn, n)
    threads = [Thread(target=lambda n=n: [call("threads", turn, n) for turn in (0, 1)]) for n in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def lose_a_rank(rank, folder):
    """The last rank leaves a call out, and then dies; each of the others writes what it is told."""
    groups = [dist.new_group(timeout=timedelta(seconds=limit)) for limit in (5, 60)]
    x, told = torch.zeros(1, 2, 4, 3), []
    ac.scaled_dot_product_attention(x, x, x, shards=ac.Shards(groups[0]))
    for turn, (group, strategy) in enumerate(zip(groups, ("gather", "ring"), strict=True)):
        start = time.monotonic()
        while rank == 3 and len(list(Path(folder).glob("late*"))) < 3:
            time.sleep(0.05)
        if rank == 3 and turn == 0:
            continue
        if rank == 3:
            os._exit(0)
        try:
            ac.scaled_dot_product_attention(x, x, x, shards=ac.Shards(group, strategy=strategy))
        except RuntimeError as error:
            told.append((str(error), time.monotonic() - start))
        Path(folder, f"late{rank}").touch()
    Path(folder, f"told{rank}").write_bytes(pickle.dumps(told))
    os._exit(0)  # a group that lost a rank is not left in order


def compared(rank, group, case, arithmetic, dtype, seed=0, heads=(4, 2), **options):
    """Results of the ranks, joined, and of one process; ``None`` on ranks that are not the first."""
    name, size, split, strategy, length = case
    if rank >= size:
        return None
    backend = ac.backend.get_backend("torch")
    more = {"length": length, "arithmetic": arithmetic, "dtype": dtype, "seed": seed, "heads": heads}
    ranks, mine = (
        [None] * size,
        of_rank(backend, ac.Shards(group, split, strategy, length), name, put=torch.from_numpy, **more, **options),
    )
    dist.all_gather_object(ranks, mine, group=group.get_group() if isinstance(group, DeviceMesh) else group)
    if rank:
        return None
    is_merged = strategy == "merge"  # so that all ranks have the whole
    expected = whole(backend, name, put=torch.from_numpy, differentiate=not is_merged, **more)
    return ranks[-1] if is_merged else joined(ranks, split, expected), expected


def compiled(loss):
    """A loss as one graph."""
    return torch.compile(loss, fullgraph=True, backend="aot_eager")


def checkpointed(loss):
    """A loss that is computed again for its gradient."""
    return lambda *arrays: torch.utils.checkpoint.checkpoint(loss, *arrays, use_reentrant=False)


def errors(rank):
    """What is told of groups that are none."""
    x, texts = torch.zeros(1, 2, 4, 3), []
    two_axes = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    for group in (None, "axis", 4, two_axes):
        try:
            ac.scaled_dot_product_attention(x, x, x, shards=ac.Shards(group))
        except (TypeError, ValueError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    every = [None] * 4
    dist.all_gather_object(every, texts)
    assert every == [texts] * 4
    return texts
