"""Threads as ranks, and calls of which they share the sequence."""

import functools
import math
import threading
from contextlib import contextmanager

import numpy as np

import attention_core as ac
from attention_core.backend import Collectives, array_namespace


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
        barrier, results, errors = threading.Barrier(size), [None] * size, []

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


def inputs(heads=(4, 2), length=16, batch=2, dtype="float64", seed=0, spread=1.0):
    """Query, key, value, and cotangents of output and logsumexp."""
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    shapes = (num_heads, 6), (num_kv_heads, 6), (num_kv_heads, 5), (num_heads, 5)
    arrays = [rng.standard_normal((batch, count, length, width)) for count, width in shapes]
    arrays[0] *= spread
    return [x.astype(dtype) for x in (*arrays, rng.standard_normal((batch, num_heads, length)))]


def parts_of(wholes, shards):
    """Query, key and value of a rank, out of those of the whole; under "merge", all queries."""
    return [x if n == 0 and shards.strategy == "merge" else ac.shard(x, shards) for n, x in enumerate(wholes)]


def by_head(batch, head, query, key):
    """A rule that looks at all positions."""
    return (key <= query) & ((key + head + batch) % 3 != 0) | (key == query)


def by_position(scores, batch, head, query, key):
    """A function of scores that looks at all positions."""
    xp = array_namespace(scores)
    return scores * 0.5 + 0.01 * xp.astype((head + 1) * (query - 2 * key + batch), scores.dtype)


def masking(scores, batch, head, query, key):
    """A function of scores that leaves a rank of the last keys nothing of the first queries."""
    xp = array_namespace(scores)
    return xp.where(query >= key, scores, -math.inf)


def options_of(name, put, heads=(4, 2), length=16, batch=2, dtype="float64", **_):
    """Options by name: those of the whole, and the arrays among them that are differentiated."""
    rng = np.random.default_rng(7)
    count, dims = heads[0], (batch, heads[0], length, length)
    ids = np.sort(rng.integers(0, 3, (batch, length)), axis=-1)
    lengths = np.asarray([length - 3, 1] + [length] * (batch - 2))[:batch]
    allowed = rng.random(dims) < 0.6

    def floats(dims, size=1.0):
        return put((size * rng.standard_normal(dims)).astype(dtype))

    made = {
        "none": dict,
        "causal": lambda: {"is_causal": True},
        "window": lambda: {"mask": ac.SlidingWindow(left=3, right=1)},
        "lengths": lambda: {"mask": ac.KeyLengths(put(lengths)), "is_causal": True},
        "no key": lambda: {"mask": ac.KeyLengths(put(lengths * 0))},
        "segments": lambda: {"mask": ac.Segments(put(ids), put(ids)), "is_causal": True},
        "array": lambda: {"mask": put(allowed)},
        "array of one head": lambda: {"mask": put(allowed[:, :1])},
        "array in a rule": lambda: {"mask": ac.Causal() & put(allowed)},
        "function": lambda: {"mask": ac.MaskFunction(by_head)},
        "bias": lambda: {"bias": floats(dims), "is_causal": True},
        "bias of one head": lambda: {"bias": floats((1, 1, *dims[2:]))},
        "bias of one row": lambda: {"bias": floats((count, 1, length))},
        "alibi": lambda: {"score_mod": ac.scores.alibi(count), "is_causal": True},
        "relative bias": lambda: {"score_mod": ac.scores.relative_bias(floats((8, count)), max_distance=9)},
        "score_mod": lambda: {"score_mod": by_position},
        "score_mod of a mask": lambda: {"score_mod": masking},
        "softcap": lambda: {"softcap": 1.5, "scale": 0.7},
        "scale": lambda: {"softcap": put(np.asarray(1.5, dtype)), "scale": put(np.asarray(0.7, dtype))},
        "sinks": lambda: {"sinks": floats((count,), 3.0), "is_causal": True},
        "dropout": lambda: {"dropout": ac.Dropout(0.4, 11), "is_causal": True},
        "dropout and score_mod": lambda: {
            "dropout": ac.Dropout(0.4, put(np.asarray([3, 4], np.int32))),
            "score_mod": by_position,
        },
    }
    return made[name]()


NAMES = (
    "none", "causal", "window", "lengths", "no key", "segments", "array", "array of one head", "array in a rule",
    "function", "bias", "bias of one head", "bias of one row", "alibi", "relative bias", "score_mod", "softcap", "scale",
    "sinks", "dropout", "dropout and score_mod",
)  # fmt: skip
EXACT = ("none", "causal", "window", "lengths", "no key", "segments", "array", "function", "bias", "softcap", "dropout")


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
    backend, shards, name, heads=(4, 2), length=16, arithmetic="fast", put=None, differentiate=True, wrap=None, **more
):
    """The same, of one rank: its rows of results and gradients, or its part of the gradient of what ranks share."""
    xp = backend.namespace
    arrays = wholes = tuple(map(put, inputs(heads, length, **more)))
    options = options_of(name, put, heads, length, **more)
    if shards is not None:
        arrays = tuple(ac.shard(x, shards, axis=axis) for x, axis in zip(wholes, (-2, -2, -2, -2, -1), strict=True))
        if shards.strategy == "merge":
            arrays, differentiate = (wholes[0], *arrays[1:3], *wholes[3:]), False
        elif "bias" in options and options["bias"].shape[-2] != 1:
            options["bias"] = ac.shard(options["bias"], shards)
    extra = differentiated(options)
    asked = {"return_logsumexp": True, "arithmetic": arithmetic} | ({} if shards is None else {"shards": shards})

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


def joined(ranks, split, name, length):
    """Results of ranks as those of the whole: rows put together, and parts of gradients summed."""
    size = len(ranks)
    found = {}
    for key in ranks[0]:
        parts = [rank[key] for rank in ranks]
        axis = -1 if key == "logsumexp" else -2
        is_shared = key in ("scale", "softcap", "sinks", "score_mod") or (key == "bias" and "row" in name)
        found[key] = np.sum(parts, axis=0) if is_shared else in_order(parts, axis, size, split, length)
    return found


def in_order(parts, axis, size, split, length):
    """Rows of ranks in the order of positions, without padding."""
    at = places(size, split, parts[0].shape[axis])
    return np.take(np.concatenate(parts, axis=axis), np.argsort(at)[:length], axis=axis)


def places(size, split, rows):
    """The positions of the rows of rank after rank."""
    every = np.arange(size * rows)
    if split == "contiguous":
        return every
    chunks = np.split(every, 2 * size)
    return np.concatenate([np.append(chunks[r], chunks[2 * size - 1 - r]) for r in range(size)])
