"""Threads as ranks, and calls of which they share the sequence."""

import functools
import math
import threading
from contextlib import contextmanager

import call_table
import numpy as np
from call_table import Sizes, hide

import attention_core as ac
from attention_core.backend import Collectives


def bytes_of(x):
    """How many bytes an array takes: that of the standard does not say."""
    return math.prod(x.shape) * np.dtype(str(x.dtype).rpartition(".")[2]).itemsize


class Threads(Collectives):
    """Collectives of threads, each of which is a rank; a group is the barrier that they meet at."""

    def __init__(self, xp):
        self.xp, self.local, self.groups, self.calls = xp, threading.local(), {}, []
        self.bytes = []  # that a rank receives

    def name_of(self, group):
        if not isinstance(group, threading.Barrier):
            raise TypeError(f"expected the group of shards as a barrier; got {type(group).__name__}")
        self.groups.setdefault(str(id(group)), (group, [None] * group.parties))
        return str(id(group))

    def size(self, group):
        return self.groups[group][0].parties

    def rank(self, group):
        return self.local.rank

    def rotate(self, arrays, group, by):
        self.calls.append("rotate")
        self.bytes.append(sum(bytes_of(x) for x in arrays))
        came = self.all_arrays(arrays, group)[(self.rank(group) - by) % self.size(group)]
        return lambda: came

    def all_arrays(self, x, group):
        barrier, box = self.groups[group]
        box[self.rank(group)] = x
        barrier.wait()
        arrays = list(box)
        barrier.wait()
        return arrays

    def all_gather(self, x, group):
        self.calls.append("gather")
        self.bytes.append((self.size(group) - 1) * bytes_of(x))
        return self.xp.stack(self.all_arrays(x, group))

    def sum_scatter(self, x, group):
        self.calls.append("scatter")
        return functools.reduce(self.xp.add, self.all_arrays(x, group))[self.rank(group), ...]

    def exchange(self, x, group):
        self.calls.append("exchange")
        self.bytes.append((self.size(group) - 1) * bytes_of(x) // self.size(group))
        return self.xp.stack([each[self.rank(group), ...] for each in self.all_arrays(x, group)])

    def largest(self, x, group):
        self.calls.append("largest")
        self.bytes.append(2 * (self.size(group) - 1) * bytes_of(x) // self.size(group))
        return functools.reduce(self.xp.maximum, self.all_arrays(x, group))

    def total(self, x, group):
        self.calls.append("total")
        self.bytes.append(2 * (self.size(group) - 1) * bytes_of(x) // self.size(group))
        return functools.reduce(self.xp.add, self.all_arrays(x, group), self.xp.zeros_like(x))


@contextmanager
def threads_as_ranks(backend, monkeypatch):
    """Collectives of threads for a backend, and ``run(size, function)``: results of ``function(group)`` by ranks."""
    lent = Threads(backend.namespace)
    monkeypatch.setattr(backend, "collectives", lent, raising=False)

    def run(size, function):
        barrier, results, errors = threading.Barrier(size, timeout=100), [None] * size, []  # no rank waits forever

        def of_rank(rank):
            lent.local.rank = rank
            try:
                results[rank] = function(barrier)
            except threading.BrokenBarrierError:
                pass
            except Exception as error:
                errors.append(error)
                barrier.abort()

        ranks = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(size)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if errors:
            raise errors[0]
        return results

    run.lent = lent
    yield run


def inputs(heads=(4, 2), length=16, batch=2, dtype="float64", seed=0, spread=1.0, change=list):
    """Query, key, value, and cotangents of output and logsumexp; of one length, or of queries and keys apart."""
    rng, sizes = np.random.default_rng(seed), sizes_of(heads, length, batch)
    query, *others = sizes.arrays(rng)
    cotangents = [rng.standard_normal((batch, heads[0], sizes.rows, *width)) for width in ((sizes.value_width,), ())]
    return change([x.astype(dtype) for x in (query * spread, *others, *cotangents)])


def sizes_of(heads, length, batch):
    return Sizes((batch,), *heads, *(length if isinstance(length, tuple) else (length, length)), 6, 5)


def parts_of(wholes, shards):
    """Query, key and value of a rank, out of those of the whole; under "merge", all queries."""
    return [x if n == 0 and shards.strategy == "merge" else ac.shard(x, shards) for n, x in enumerate(wholes)]


def options_of(name, put, heads=(4, 2), length=16, batch=2, dtype="float64", **_):
    """Options of a name, of a dtype."""

    def put_as(x):
        return put(x.astype(dtype) if x.dtype == np.float64 else x)

    return call_table.options_of(name, sizes_of(heads, length, batch), put_as)


EXACT = ("none", "causal", "window", "lengths", "no keys", "segments of samples", "array", "function", "bias of bhmn",
         "softcap", "dropout")  # fmt: skip


def differentiated(options):
    """The arrays among options that have a gradient, by name."""
    arrays = {
        name: options[name] for name in ("bias", "scale", "softcap", "sinks") if hasattr(options.get(name), "dtype")
    }
    held = getattr(options.get("score_mod"), "arrays", ())
    if held and "float" in str(held[0].dtype):
        arrays["score_mod"] = held[0]
    return arrays


def with_arrays(options, arrays):
    """The options, with other arrays in the place of those that are differentiated."""
    options = options | {name: array for name, array in arrays.items() if name != "score_mod"}
    if "score_mod" in arrays:
        mod = options["score_mod"]
        options["score_mod"] = ac.scores.ScoreMod(mod.function, (arrays["score_mod"], *mod.arrays[1:]), mod.num_heads)
    return options


def loss_of(xp, result, cotangents):
    """Output and logsumexp, weighted; rows without a key count nothing."""
    output, logsumexp = result.output, result.logsumexp
    finite = xp.where(logsumexp > -1e300, logsumexp, 0.0)
    wide = xp.astype(output, logsumexp.dtype)
    return xp.sum(wide * xp.astype(cotangents[0], wide.dtype)) + xp.sum(finite * xp.astype(cotangents[1], wide.dtype))


def whole(backend, name, **more):
    """Output, logsumexp and gradients of one process, as NumPy arrays by name."""
    return of_rank(backend, None, name, **more)


def of_rank(
    backend,
    shards,
    name,
    length=16,
    arithmetic="fast",
    implementation="auto",
    put=None,
    differentiate=True,
    wrap=None,
    hidden=False,
    **more,
):
    """The same, of one rank: its rows of results and gradients, or its part of the gradient of what ranks share.

    What no query attends to may be NaN, and so may queries of fully masked rows.
    """
    xp, more = backend.namespace, {"heads": (4, 2), "batch": 2, "length": length} | more
    plain = inputs(**more)
    if hidden:
        sizes = sizes_of(more["heads"], length, more["batch"])
        plain[:3] = hide(plain[:3], options_of(name, np.asarray, **more), sizes)
    arrays = wholes = tuple(map(put, plain))
    options = options_of(name, put, **more)
    if shards is not None:
        is_merge = shards.strategy == "merge"  # of which all have the queries
        axes = zip(wholes, (-2, -2, -2, -2, -1), (is_merge, False, False, is_merge, is_merge), strict=True)
        arrays = tuple(x if is_whole else ac.shard(x, shards, axis=axis) for x, axis, is_whole in axes)
        differentiate = differentiate and not is_merge
        if not is_merge and "bias" in options and options["bias"].shape[-2:-1] not in ((), (1,)):
            options["bias"] = ac.shard(options["bias"], shards)
    extra = differentiated(options)
    asked = {"return_logsumexp": True, "arithmetic": arithmetic, "implementation": implementation}
    asked |= {} if shards is None else {"shards": shards}

    def attend(arrays, settings):
        return ac.scaled_dot_product_attention(*arrays[:3], **settings, **asked)

    def loss(arrays, extra):
        return loss_of(xp, attend(arrays, with_arrays(options, extra)), arrays[3:])

    forward = lambda *arrays: attend(arrays, options)  # noqa: E731
    result = (forward if wrap is None or differentiate else wrap(forward))(*arrays)
    found = {"output": result.output, "logsumexp": result.logsumexp}
    if differentiate:
        loss = loss if wrap is None else wrap(loss)
        _, (of_arrays, of_extra) = backend.value_and_grad(loss)(arrays, extra)
        found |= dict(zip(("query", "key", "value"), of_arrays[:3], strict=True)) | of_extra
    return {key: backend.to_numpy(x) for key, x in found.items()}


def joined(ranks, split, expected):
    """Results of ranks as those of the whole: rows put together, of which padding is empty, and parts of gradients summed."""
    found = {}
    for key, x in expected.items():
        parts, axis = [rank[key] for rank in ranks], -1 if key == "logsumexp" else -2
        if key in ("scale", "softcap", "sinks", "score_mod") or (key == "bias" and x.shape[-2:-1] in ((), (1,))):
            found[key] = np.sum(parts, axis=0)
            continue
        rows = in_order(parts, axis, len(ranks), split)
        found[key], padding = np.split(rows, [x.shape[axis]], axis=axis)
        assert not np.any(padding, where=padding != -np.inf)
    return found


def check_close(found, expected, most=1e-13):
    """Largest errors, relative to the largest number; what is infinite is the same."""
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        finite = np.isfinite(x)
        np.testing.assert_array_equal(found[key][~finite], x[~finite], err_msg=key)
        largest = np.max(np.abs(x), where=finite, initial=1e-300)
        np.testing.assert_allclose(found[key][finite], x[finite], rtol=0, atol=most * largest, err_msg=key)


def check_told(told, count):
    """Whether so many ranks, or ways to differentiate, are told the same of a differentiated merge."""
    (text,) = set(told)
    assert len(told) == count
    assert "expected strategy='merge' of shards, which is for decoding, not to be differentiated" in text


def in_order(parts, axis, size, split, length=None):
    """Rows of ranks in the order of positions, up to a length."""
    at = places(size, split, parts[0].shape[axis])
    return np.take(np.concatenate(parts, axis=axis), np.argsort(at)[:length], axis=axis)


def places(size, split, rows):
    """The positions of the rows of rank after rank."""
    every = np.arange(size * rows)
    if split == "contiguous":
        return every
    chunks = np.split(every, 2 * size)
    return np.concatenate([np.append(chunks[r], chunks[2 * size - 1 - r]) for r in range(size)])
