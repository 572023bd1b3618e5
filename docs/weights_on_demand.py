"""Measure weights on demand: `python docs/weights_on_demand.py` prints errors, memory and time of each library.

Errors are against all weights of the dense form, in units in the last place of the largest weight of a row. Memory is
of NumPy, which tells its allocations. Time is the median of seven calls, in turns with attention of the same queries.
"""

import statistics
import time
import tracemalloc

import numpy as np

import attention_core as ac

LIBRARIES = ("numpy", "torch", "jax", "tensorflow")
HEADS, WIDTH, FEW, LONG = 4, 64, 16, 65536
RNG = np.random.default_rng(0)


def options_of(backend, length):
    """Options by name, for M = N."""
    mask = RNG.random((length, length)) > 0.3
    mask[length // 2] = False  # a fully masked row
    biases = RNG.standard_normal((HEADS, length, length)).astype("float32")
    return {
        "none": {},
        "is_causal": {"is_causal": True},
        "mask": {"mask": backend.from_numpy(mask)},
        "window, ALiBi": {"mask": ac.SlidingWindow(left=60), "score_mod": ac.scores.alibi(HEADS)},
        "bias, softcap": {"bias": backend.from_numpy(biases), "softcap": 5.0},
        "sinks": {"sinks": backend.from_numpy(np.ones(HEADS, "float32")), "is_causal": True},
        "reproducible": {"is_causal": True, "arithmetic": "reproducible"},
    }


def made(length):
    """Query and key."""
    return RNG.standard_normal((2, 1, HEADS, length, WIDTH)).astype("float32")


def ulps(found, expected):
    """The largest distance, in units in the last place of the largest weight of a row."""
    unit = np.spacing(np.maximum(expected.max(-1, keepdims=True), np.finfo(np.float32).tiny))
    return float((abs(found - expected) / unit).max())


def errors(backend, length=300):
    """Rows of a table: of each option, how far chosen weights are from those of all."""
    query, key = map(backend.from_numpy, made(length))
    queries, heads = [0, 7, length // 2, length - 1], [1, 3]
    for name, options in options_of(backend, length).items():
        full = ac.scaled_dot_product_attention(query, key, key, return_weights=True, implementation="dense", **options)
        expected = backend.to_numpy(full.weights)[:, heads][:, :, queries]
        chosen = {"queries": queries, "heads": heads, **options}
        yield name, ulps(backend.to_numpy(ac.weights.attention_weights(query, key, **chosen)), expected)


def seconds(*calls):
    """The median of seven runs of each, in turns, after one."""
    found = []
    for _ in range(8):
        found.append([])
        for compute in calls:
            start = time.perf_counter()
            compute()
            found[-1].append(time.perf_counter() - start)
    return [statistics.median(each) for each in zip(*found[1:], strict=True)]


def main():
    print("| library | option | ulps |")
    print("|---|---|---|")
    for library in LIBRARIES:
        for name, found in errors(ac.backend.get_backend(library)):
            print(f"| {library} | {name} | {found:.2g} |", flush=True)
    arrays, queries = made(LONG), range(LONG - FEW, LONG)
    tracemalloc.start()
    found = ac.weights.attention_weights(*arrays, queries=queries, is_causal=True)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    every = HEADS * LONG * LONG * 4
    print(f"\n{FEW} queries, {LONG:,} keys, {HEADS} heads: {found.nbytes / 2**20:.0f} MiB of weights,", end=" ")
    print(f"{most / 2**20:.0f} MiB at most; all weights have {every / 2**30:.0f} GiB")
    for library in LIBRARIES:
        backend = ac.backend.get_backend(library)
        query, key = map(backend.from_numpy, arrays)

        rows, mask = query[:, :, LONG - FEW :], ac.Causal(offset=LONG - FEW)

        def few(query=query, key=key, backend=backend):
            backend.to_numpy(ac.weights.attention_weights(query, key, queries=queries, is_causal=True))

        def attention(rows=rows, key=key, backend=backend, mask=mask):
            backend.to_numpy(ac.scaled_dot_product_attention(rows, key, key, mask=mask))

        taken, of_attention = seconds(few, attention)
        ratio = f"{taken / of_attention:.1f} times attention of these queries"
        print(f"{library}: {1000 * taken:.0f} ms, {ratio}", flush=True)


if __name__ == "__main__":
    main()
