"""Print memory or processor time of a causal call on ranks of gloo, forward and backward, next to one process.

Memory is the most that one process grows by, a way for each start. Time is the median of the sum over ranks, with all
ways in alternation, on the processors that there are::

    python evidence/sharding/processes.py memory auto
    torchrun --nproc-per-node 4 evidence/sharding/processes.py memory ring
    torchrun --nproc-per-node 4 evidence/sharding/processes.py time
    torchrun --nproc-per-node 4 evidence/sharding/processes.py time blockwise

The last has the ways of that word alone. With ``--nproc-per-node 1``, the time is that of a group of one.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from attention_core import Shards, scaled_dot_product_attention

LENGTH, HEADS, ROUNDS = 8192, {"memory": 8, "time": 4}, 5
ALONE = ("auto", "blockwise", "reproducible")
SHARED = ("gather", "heads", "ring", "blockwise gather", "blockwise heads", "blockwise ring", "reproducible gather")


def seconds(way, rows, heads):
    """The processor time of a call of this process: a strategy of ranks, or an implementation of one process."""
    *words, strategy = ["", *way.split()] if way not in ALONE else [way, ""]
    options = {"arithmetic": "reproducible"} if "reproducible" in words else {"implementation": words[-1] or "auto"}
    if strategy:
        options["shards"] = Shards(dist.group.WORLD, strategy=strategy)
    arrays = [torch.randn(1, heads, rows, 64).requires_grad_() for _ in range(3)]
    start = time.process_time()
    output = scaled_dot_product_attention(*arrays, is_causal=True, **options)
    output.backward(torch.ones_like(output))
    return time.process_time() - start


def kilobytes(name):
    """A number of the process that Linux tells."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def memory(way, size):
    """Print by how many MiB this process grows."""
    seconds(way, 256 // size, HEADS["memory"])  # what libraries need
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("VmRSS")
    seconds(way, LENGTH // size, HEADS["memory"])
    print(f"{way}: {(kilobytes('VmHWM') - before) / 1024:.0f} MiB", flush=True)


def times(word, rank, size):
    """Print the processor time of each way of that word."""
    found = {}
    for turn in range(ROUNDS + 1):
        for way in (each for each in ALONE + SHARED if word in each):
            rows = LENGTH if way in ALONE else LENGTH // size
            every = [0.0] * size
            dist.all_gather_object(every, seconds(way, rows, HEADS["time"]) if way not in ALONE or rank == 0 else 0.0)
            found.setdefault(way, []).extend([sum(every)] if turn else [])
    for way, every in found.items() if rank == 0 else ():
        print(f"{way}: {statistics.median(every):.2f} s", flush=True)


def main(what, way=""):
    """Run as a command."""
    torch.set_num_threads(1)
    rank, size = 0, 1
    if what == "time" or way not in ALONE:
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
    memory(way, size) if what == "memory" else times(way, rank, size)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
