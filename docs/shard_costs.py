"""Print two tables of docs/guides/sharding-numbers.md: the work of each rank, and what is to be expected on paper.

Work is counted in calls with shards on NumPy: the scores in the blocks that the plan of each local call visits, which
are then not computed. Bytes are those of the guide's formulas, for one layer forward. Bandwidths and FLOP/s are those
that the makers publish; kernels reach a part of these.
"""

import itertools
import math

import numpy as np

from attention_core import Causal, Shards, SlidingWindow, scaled_dot_product_attention
from attention_core._attention.blocks import forward
from attention_core._attention.blocks.visits import make_visits
from attention_core.backend import Collectives, get_backend

LENGTH, COUNTED = 32768, 8  # positions, and heads
MASKS = {"causal": Causal(), "window of 4,096": SlidingWindow(left=4095, right=0)}
TOKENS, HEADS, KV_HEADS, WIDTH, BYTES = 2**20, 32, 8, 128, 2
MACHINES = {  # FLOP/s of bfloat16, bytes a second inside of a node and between nodes, ranks of a node
    "H100, NVLink 450 GB/s, InfiniBand 50 GB/s": (989e12, 450e9, 50e9, 8),
    "TPU v5p, ICI 600 GB/s": (459e12, 600e9, 600e9, 1),
}
SHARE = 0.6  # of these, which FlashAttention-3 reports for long causal sequences


class OneRank(Collectives):
    """A rank that gets from others what it has itself."""

    def __init__(self, rank, size):
        self.of, self.count = rank, size

    def name_of(self, group):
        return group

    def size(self, group):
        return self.count

    def rank(self, group):
        return self.of

    def all_gather(self, x, group):
        return np.stack([x] * self.count)

    def exchange(self, x, group):
        return x

    def rotate(self, arrays, group, by):
        return lambda: arrays


def visited(rank, size, strategy, split, mask):
    """How many millions of scores, of one head, are in the blocks that a call of this rank visits."""
    scores, backend = [], get_backend("numpy")

    def count(grid):
        visits = make_visits(grid, by_key=False, run_keys=grid.plan.max_keys_per_run)
        runs = [[range(grid.counts[1])]] * grid.counts[0] if visits.order is None else visits.order[0]
        pairs = sum(len(run) if isinstance(run, range) else 1 for each in runs for run in each)
        scores.append(pairs * math.prod(grid.sizes) * math.prod(grid.dims))
        *dims, _ = grid.operands.query.shape
        return np.zeros((*dims, 1), np.float32), np.zeros(dims, np.float32), np.zeros(dims, np.float32)

    backend.collectives, forward._grid_results = OneRank(rank, size), count
    x = np.zeros((1, COUNTED, LENGTH // size, 1), np.float32)
    shards = Shards("ranks", split, strategy)
    scaled_dot_product_attention(x, x, x, mask=mask, shards=shards, implementation="blockwise")
    return sum(scores) / COUNTED / 1e6


def work_table():
    """Scores of each rank under gathering, and the largest number over the mean of each strategy."""
    print(
        "| mask | split | R | millions of scores | gather: max / mean | ring | heads |\n|---|---|---|---|---|---|---|"
    )
    for (name, mask), split, size in itertools.product(MASKS.items(), ("contiguous", "zigzag"), (4, 8)):
        ways = [[visited(rank, size, way, split, mask) for rank in range(size)] for way in ("gather", "ring", "heads")]
        least, most = min(ways[0]), max(ways[0])
        ends = f"{least:.1f} to {most:.1f}" if least < most else f"{most:.1f}"
        print(f"| {name} | {split} | {size} | {ends} |", *(f"{max(each) * size / sum(each):.2f} |" for each in ways))


def costs(strategy, size):
    """Bytes that a rank receives, and steps; none where heads would be split."""
    kv, query = (2 * TOKENS * heads * WIDTH * BYTES for heads in (KV_HEADS, HEADS))
    if strategy != "heads":
        return kv * (size - 1) // size, size - 1 if strategy == "ring" else 2
    if HEADS % size:
        return None
    repeats = max(1, size // KV_HEADS)
    return (query + repeats * kv) // size * (size - 1) // size, 4


def paper_table():
    """Bytes, steps and the share of time that computes: in sequence, and if all that is sent hides behind it."""
    print("| machine | R | strategy | received | steps | computes | sends | share | hidden |\n|" + "---|" * 9)
    for machine, (flops, inside, between, node) in MACHINES.items():
        for size in (8, 64, 1024):
            computes = 2 * TOKENS**2 * HEADS * WIDTH / size / (flops * SHARE)
            for strategy in ("gather", "heads", "ring"):
                cost = costs(strategy, size)
                if cost is None:
                    print(f"| {machine} | {size:,} | {strategy} | {HEADS} heads: refused | | | | | |")
                    continue
                sends = cost[0] / (inside if size <= node else between)
                share, hidden = computes / (computes + sends), computes / max(computes, sends)
                row = f"{cost[0] / 1e9:.2f} GB | {cost[1]:,} | {1e3 * computes:,.0f} ms | {1e3 * sends:,.1f} ms"
                print(f"| {machine} | {size:,} | {strategy} | {row} | {share:.0%} | {hidden:.0%} |")


if __name__ == "__main__":
    work_table()
    print()
    paper_table()
