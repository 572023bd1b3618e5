"""Print the largest errors of ranks against one process, by option, by strategy and by split.

They are those of output, logsumexp and gradients, each relative to its largest number. 2, 3 and 4 ranks share 13
positions. A dash was not run. The last two rows are errors of the gradients of two numbers against float64, of one
process and of 4 ranks, as root mean squares over draws. With ``PYTHONPATH=tests/helpers``::

    torchrun --nproc-per-node 4 docs/shard_errors.py

Other engines have one way for each option, as each takes long, and print a column. JAX compiles all that it runs. dask
has no gradients, and TensorFlow gathers or merges::

    torchrun --nproc-per-node 8 docs/shard_errors.py eight
    torchrun --nproc-per-node 2 docs/shard_errors.py compiled
    JAX_ENABLE_X64=1 XLA_FLAGS=--xla_force_host_platform_device_count=8 python docs/shard_errors.py jax
    JAX_ENABLE_X64=1 XLA_FLAGS=--xla_force_host_platform_device_count=2 python docs/shard_errors.py processes
    python docs/shard_errors.py tensorflow
    python docs/shard_errors.py dask
"""

import functools
import itertools
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from shard_helpers import NAMES, inputs, joined, of_rank, options_of, whole

import attention_core as ac

LENGTH = 13
WAYS = [*itertools.product(("gather", "ring", "heads"), ("contiguous", "zigzag")), ("merge", "contiguous")]


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
        sizes = (2, 4) if strategy == "heads" else (2, 3, 4)
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
        settings = name, LENGTH, "fast", dtype, (8, 8) if strategy == "heads" else (4, 2)
        shards = ac.Shards("ranks", split, strategy, LENGTH)
        yield name, (strategy, split), largest_error((results(*settings, shards, size), results(*settings)))


def of_few(size, dtype, **options):
    """Errors on so many ranks of gloo, one way for each option."""
    import torch.distributed as dist
    from gloo_ranks import compared

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    for name, (strategy, split) in zip(NAMES, itertools.cycle(WAYS), strict=False):
        heads = (8, 8) if strategy == "heads" else (4, 2)
        case = name, size, split, strategy, LENGTH
        pair = compared(dist.get_rank(), dist.group.WORLD, case, "fast", dtype, heads=heads, **options)
        if not dist.get_rank():
            yield name, (strategy, split), largest_error(pair)
    dist.barrier()


def of_compiled(dtype):
    """The same of compiled calls, in one graph each."""
    import torch
    from gloo_ranks import compiled

    def compiled_anew(loss):
        torch._dynamo.reset()  # which compiles a few programs of the same code
        return compiled(loss)

    return of_few(2, dtype, wrap=compiled_anew)


def of_processes(dtype, *arguments):
    """Errors of two processes of JAX, with two devices each; rows of a process are zeros on the other."""
    import jax
    from jax_ranks import results

    ways = [way for way in WAYS if way[0] != "merge"]
    if arguments:
        port, process, path = arguments
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    else:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port, command = free.getsockname()[1], [sys.executable, __file__, "processes", dtype]
            free.close()
            paths = [Path(folder, str(process)) for process in (0, 1)]
            both = [subprocess.Popen([*command, str(port), path.name, str(path)]) for path in paths]
            assert [each.wait() for each in both] == [0, 0]
            first, second = (pickle.loads(path.read_bytes()) for path in paths)
    mine = {}
    for name, (strategy, split) in zip(NAMES, itertools.cycle(ways), strict=False):
        settings = name, LENGTH, "fast", dtype, (4, 4) if strategy == "heads" else (4, 2)
        if arguments:
            found = results(*settings, ac.Shards("ranks", split, strategy, LENGTH), 4)
            with jax.default_device(jax.local_devices()[0]):
                mine[name] = found, results(*settings)
        else:
            found, whole = first[name]
            rows = {key: np.where(x == 0, second[name][0][key], x) for key, x in found.items()}
            yield name, (strategy, split), largest_error((rows, whole))
    if arguments:
        Path(path).write_bytes(pickle.dumps(mine))


def of_tensorflow(dtype):
    """Errors of two logical processors of TensorFlow, eager."""
    import tensorflow as tf
    from tensorflow_ranks import two_replicas

    strategy, backend = two_replicas(), ac.backend.get_backend("tensorflow")
    ways = [way for way in WAYS if way[0] in ("gather", "merge")]
    for name, (way, split) in zip(NAMES, itertools.cycle(ways), strict=False):
        more, ranks = {"length": LENGTH, "dtype": dtype, "put": tf.constant}, [None, None]
        shards = ac.Shards(strategy, split, way, LENGTH)

        def of_replica(name=name, shards=shards, more=more, ranks=ranks):
            rank = backend.collectives.rank(backend.collectives.name_of(strategy))
            ranks[rank] = of_rank(backend, shards, name, **more)

        strategy.run(of_replica)
        expected = whole(backend, name, differentiate=way != "merge", **more)
        found = ranks[-1] if way == "merge" else joined(ranks, split, name, LENGTH)
        yield name, (way, split), largest_error((found, expected))


def of_dask(dtype):
    """Errors of chunks in two processes of dask, forward."""
    import dask.array
    from distributed import Client, LocalCluster

    from attention_dask import attention

    backend = ac.backend.get_backend("numpy")
    with LocalCluster(2, threads_per_worker=1) as cluster, Client(cluster):
        for name in NAMES:
            arrays = [dask.array.from_array(x, (1, 2, 5, -1)) for x in inputs(length=LENGTH, dtype=dtype)[:3]]
            lazy = attention(*arrays, **options_of(name, np.asarray, length=LENGTH, dtype=dtype), return_logsumexp=True)
            found = dict(zip(("output", "logsumexp"), dask.compute(lazy.output, lazy.logsumexp), strict=True))
            expected = whole(backend, name, length=LENGTH, dtype=dtype, put=np.asarray, differentiate=False)
            yield name, ("chunks", ""), largest_error((found, expected))


ENGINES = {
    "gloo": of_gloo,
    "eight": functools.partial(of_few, 8),
    "compiled": of_compiled,
    "jax": of_devices,
    "processes": of_processes,
    "tensorflow": of_tensorflow,
    "dask": of_dask,
}


def main(engine="gloo", *arguments):
    """Print a table by option, and one by split: the largest errors in float64 and in float32."""
    cells, ways = {}, {}
    for dtype in ("float64", "float32"):
        for name, (strategy, split), error in ENGINES[engine](dtype):
            ways[name] = strategy, split
            for row in ways[name][1], name:
                found = cells.setdefault((row, strategy), {})
                found[dtype] = max(error, found.get(dtype, 0))
    if engine != "gloo":
        for name, (strategy, split) in ways.items():
            print(f"| {name} | {strategy} {split} | {', '.join(f'{x:.1e}' for x in cells[name, strategy].values())} |")
        cells = {}
    for title, rows in (("option", NAMES), ("split", ("contiguous", "zigzag"))) if cells else ():
        print(f"| {title} | gather | heads | ring | merge |\n|---|---|---|---|---|")
        for row in rows:
            found = (cells.get((row, strategy), {}).values() for strategy in ("gather", "heads", "ring", "merge"))
            print(f"| {row} |", *(f"{', '.join(f'{x:.1e}' for x in each) or '–'} |" for each in found))
    scalars = of_scalars() if engine == "gloo" else {}  # by all ranks, of which the first prints
    for name in ("scale", "softcap") if cells else ():
        true = scalars["float64", name, "one process"]
        errors = {way: scalars["float32", name, way] - true for way in ("one process", "gather", "heads", "ring")}
        print(f"| {name} |", *(f"{np.sqrt(np.mean(each**2) / np.mean(true**2)):.1e} |" for each in errors.values()))


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) < 3 else list(of_processes(*sys.argv[2:]))
