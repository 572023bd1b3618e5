"""Print two tables of docs/guides/sharding.md: blocks of each rank, and what is to be expected on paper.

A block is 512 queries and 512 keys of which a mask leaves something. Bytes are those of the guide's formulas, for one
layer forward. Bandwidths and FLOP/s are those that the makers publish; kernels reach a part of these.
"""

LENGTH, BLOCK = 32768, 512
MASKS = {"causal": (LENGTH, 0), "window of 4,096": (4095, 0)}
TOKENS, HEADS, KV_HEADS, WIDTH, BYTES = 2**20, 32, 8, 128, 2
MACHINES = {  # FLOP/s of bfloat16, bytes a second inside of a node and between nodes, ranks of a node
    "H100, NVLink 450 GB/s, InfiniBand 50 GB/s": (989e12, 450e9, 50e9, 8),
    "TPU v5p, ICI 600 GB/s": (459e12, 600e9, 600e9, 1),
}
SHARE = 0.6  # of these, which FlashAttention-3 reports for long causal sequences


def chunks(rank, size, split):
    """The first position and the length of each run of a rank."""
    count = LENGTH // size // (2 if split == "zigzag" else 1)
    return [(each * count, count) for each in ((rank,) if split == "contiguous" else (rank, 2 * size - 1 - rank))]


def blocks(rank, size, split, left, right):
    """How many blocks of the queries of a rank a window leaves."""
    found = 0
    for start, count in chunks(rank, size, split):
        for query in range(start, start + count, BLOCK):
            first, last = max(0, query - left) // BLOCK, min(LENGTH - 1, query + BLOCK - 1 + right) // BLOCK
            found += last - first + 1
    return found


def work_table():
    """Blocks of each rank, and the largest number over the mean."""
    print("| mask | split | R | blocks of ranks | max / mean |\n|---|---|---|---|---|")
    for mask, (left, right) in MASKS.items():
        for split in ("contiguous", "zigzag"):
            for size in (4, 8):
                found = [blocks(rank, size, split, left, right) for rank in range(size)]
                ends = f"{min(found):,} to {max(found):,}" if min(found) < max(found) else f"{found[0]:,}"
                print(f"| {mask} | {split} | {size} | {ends} | {max(found) * size / sum(found):.2f} |")


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
