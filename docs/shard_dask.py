"""Print tasks, warnings and time of causal attention by two workers of dask, of 2 GiB each, next to one process.

65,536 positions of 4 heads come in chunks of 4,096, as random numbers that no process holds at once::

    python docs/shard_dask.py
"""

import sys
import time
import warnings

import dask
import dask.array
import numpy as np
from distributed import Client, LocalCluster

from attention_core import scaled_dot_product_attention
from attention_dask import attention

HEADS, WIDTH, CHUNK = 4, 64, 4096


def main(length="65536"):
    """Run as a command."""
    shape, chunks = (1, HEADS, int(length), WIDTH), (1, HEADS, CHUNK, WIDTH)
    draw = dask.array.random.default_rng(0)
    arrays = [draw.standard_normal(shape, chunks=chunks, dtype=np.float32) for _ in range(3)]
    lazy = attention(*arrays, is_causal=True)
    keys, count = [str(key) for key in lazy.__dask_graph__()], int(length) // CHUNK
    pieces, merges = (sum(word in key for key in keys) for word in ("-piece", "-merge"))
    print(f"{pieces} pieces of {count**2} pairs, {merges} merges")
    warnings.simplefilter("always")
    with (
        LocalCluster(2, threads_per_worker=1, memory_limit="2GiB") as cluster,
        Client(cluster),
        warnings.catch_warnings(record=True) as told,
    ):
        start = time.perf_counter()
        found = lazy.compute()
        print(f"two workers: {time.perf_counter() - start:.0f} s, warnings: {[str(each.message) for each in told]}")
    arrays = dask.compute(*arrays)
    start = time.perf_counter()
    whole = scaled_dot_product_attention(*arrays, is_causal=True)
    print(f"one process: {time.perf_counter() - start:.0f} s")
    print(f"largest difference: {np.max(np.abs(whole - found)):.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
