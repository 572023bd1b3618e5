"""Print the largest errors of ranks against one process, by option, by strategy and by split.

They are those of output, logsumexp and gradients, each relative to its largest number. 2, 3 and 4 ranks share 13
positions. A compiler takes long, so that JAX has one way for each option. A dash was not run. The last two rows are
errors of the gradients of two numbers against float64, of one process and of 4 ranks, as root mean squares over draws::

    torchrun --nproc-per-node 4 tests/helpers/shard_errors.py
    JAX_ENABLE_X64=1 XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/helpers/shard_errors.py jax
"""

import itertools
import sys

import numpy as np
from shard_helpers import NAMES, RUNS

import attention_core as ac

LENGTH = 13
WAYS = [
    *itertools.product(("gather", "ring"), ("contiguous", "zigzag", "striped", RUNS)),
    *itertools.product(("heads",), ("contiguous", "zigzag", "striped")),
    *itertools.product(("merge",), ("contiguous", "striped", RUNS)),
]


def largest_error(pair):
    """The largest error of all results, each relative to its largest number; what is infinite has to be the same."""
    found, expected = pair
    most = 0.0
    for key, x in expected.items():
        finite = np.isfinite(x)
        assert np.array_equal(found[key][~finite], x[~finite]), key
        scale = max(np.max(np.abs(x), where=finite, initial=0), 1e-300)
        most = max(most, np.max(np.abs(np.where(finite, found[key] - x, 0)), initial=0) / scale)
    return most


def of_gloo(dtype):
    """Errors by option and way, on the first rank, over all numbers of ranks that the way has."""
    import torch.distributed as dist
    from gloo_ranks import compared

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
    for name, (strategy, split) in itertools.product(NAMES, WAYS):
        sizes = (3,) if split == RUNS else (2, 4) if strategy == "heads" else (2, 3, 4)
        cases = [(name, size, split, strategy, LENGTH) for size in sizes]
        pairs = [compared(dist.get_rank(), groups[case[1]], case, "fast", dtype) for case in cases]
        if not dist.get_rank():
            yield name, (strategy, split), max(map(largest_error, pairs))
    dist.barrier()


def of_scalars(count=10):
    """Gradients of scale and softcap of so many draws: in float64, of one process in float32, and of 4 ranks."""
    import torch.distributed as dist
    from gloo_ranks import compared

    found = {}
    for seed, dtype in itertools.product(range(count), ("float64", "float32")):
        for strategy in ("gather", "heads", "ring"):
            pair = compared(
                dist.get_rank(), dist.group.WORLD, ("scale", 4, "zigzag", strategy, LENGTH), "fast", dtype, seed=seed
            )
            for way, each in zip((strategy, "one process"), pair or ({}, {}), strict=True):
                for name in ("scale", "softcap") if pair else ():
                    found.setdefault((dtype, name, way), {})[seed] = float(each[name])
    return {key: np.asarray(list(each.values())) for key, each in found.items()}


def of_devices(dtype):
    """Errors by option and way, each on some number of devices of JAX."""
    from jax_ranks import results

    ways = [way for way in WAYS if way[0] != "merge"]
    for name, (strategy, split), size in zip(NAMES, itertools.cycle(ways), itertools.cycle((4, 2, 8)), strict=False):
        size = 3 if split == RUNS else size
        settings = name, LENGTH, "fast", dtype, (8, 8) if strategy == "heads" else (4, 2)
        shards = ac.Shards("ranks", split, strategy, LENGTH)
        yield name, (strategy, split), largest_error((results(*settings, shards, size), results(*settings)))


def main(engine="gloo"):
    """Print a table by option, and one by split: the largest errors in float64 and in float32."""
    cells = {}
    for dtype in ("float64", "float32") if engine == "gloo" else ("float64",):
        for name, (strategy, split), error in (of_devices if engine == "jax" else of_gloo)(dtype):
            for row in (name, split if isinstance(split, str) else "runs"):
                found = cells.setdefault((row, strategy), {})
                found[dtype] = max(error, found.get(dtype, 0))
    for title, rows in (("option", NAMES), ("split", ("contiguous", "zigzag", "striped", "runs"))) if cells else ():
        print(f"| {title} | gather | heads | ring | merge |\n|---|---|---|---|---|")
        for row in rows:
            found = (cells.get((row, strategy), {}).values() for strategy in ("gather", "heads", "ring", "merge"))
            print(f"| {row} |", *(f"{', '.join(f'{x:.1e}' for x in each) or '–'} |" for each in found))
    scalars = of_scalars() if engine == "gloo" else {}
    for name in ("scale", "softcap") if scalars else ():
        true = scalars["float64", name, "one process"]
        errors = {way: scalars["float32", name, way] - true for way in ("one process", "gather", "heads", "ring")}
        print(f"| {name} |", *(f"{np.sqrt(np.mean(each**2) / np.mean(true**2)):.1e} |" for each in errors.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
