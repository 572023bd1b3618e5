"""A kernel in NumPy, by blocks of 64 keys with a running maximum, right as it stands; and faults to plant in it."""

from dataclasses import dataclass, replace

import numpy as np

from attention_conformance import check_subject
from attention_conformance.problem import put

BLOCK = 64
AT = np.s_


def attention(query, key, value, mask=None, is_causal=False, scale=None):
    """The honest kernel: float32 inside, non-finite values kept apart, 0 for fully masked rows."""
    return Kernel()(query, key, value, mask, is_causal, scale)


class Kernel:
    """The kernel with one fault, by its name; without a name, the honest one."""

    def __init__(self, fault=""):
        self.fault, self.kept, self.calls, self.buffer = fault, {}, 0, None
        self.narrow_to = self.bias = None

    def __call__(self, query, key, value, mask=None, is_causal=False, scale=None):
        fault, self.calls = self.fault, self.calls + 1
        if fault in ("kept by shape", "kept by mask's shape"):
            if fault == "kept by mask's shape":
                mask = None if mask is None else self.kept.setdefault(mask.shape, mask.copy())
            else:
                shapes = (query.shape, key.shape, scale, is_causal, mask is None)
                return self.kept.setdefault(shapes, self.whole(query, key, value, mask, is_causal, scale)).copy()
        if fault == "causality kept by queries" and is_causal:
            rows, columns = np.arange(query.shape[-2])[:, None], np.arange(key.shape[-2])[None, :]
            kept = self.kept.setdefault(query.shape[-2], key.shape[-2])
            seen, is_causal = (columns <= rows) & (columns < kept), False
            mask = seen if mask is None else mask & seen
        if fault == "keys in another order each call" and mask is None and not is_causal and key.shape[-2] > 128:
            order = np.roll(np.arange(key.shape[-2]), self.calls)
            key, value = key[..., order, :], value[..., order, :]
        if fault == "kept by address":
            at = query.__array_interface__["data"][0], query.shape, key.__array_interface__["data"][0]
            if at not in self.kept:
                self.kept[at] = query, key, self.whole(query, key, value, mask, is_causal, scale)
            return self.kept[at][2].copy()
        if fault == "keeps all memory":
            self.kept[self.calls] = [each.copy() for each in (query, key, value)]
        if fault == "scales the query in place":
            query *= np.asarray(1.0, query.dtype)
            query += np.asarray(1e-3, query.dtype)
        if fault == "plan of the first strides":
            order = self.kept.setdefault(value.shape, value.strides)
            value = np.lib.stride_tricks.as_strided(value, value.shape, order)
        output = self.whole(query, key, value, mask, is_causal, scale)
        if fault == "a last bit that counts the samples":
            output = np.nextafter(output, np.asarray(9, output.dtype)) if query.shape[0] > 3 else output
        if fault in OUTPUTS:
            output = OUTPUTS[fault][1](output, Call(query, key, value, mask, is_causal, scale, self.calls))
        if fault == "clears the row after the cache" and key.base is not None and key.base.ndim == key.ndim:
            key.base[..., key.shape[-2] : key.shape[-2] + 1, :] = 0
        if fault == "one buffer for all results":
            if self.buffer is None or self.buffer.shape != output.shape or self.buffer.dtype != output.dtype:
                self.buffer = output
            self.buffer[...] = output
            return self.buffer
        if fault == "adds to an old buffer":
            output = output + np.asarray(self.kept.get(output.shape, 0), output.dtype)
            self.kept[output.shape] = 0.5 * output
        if fault == "the value itself" and key.shape[-2] == query.shape[-2]:
            value[...] = output
            return value
        return output

    def whole(self, query, key, value, mask, is_causal, scale):
        fault, dtype, rows, width = self.fault, query.dtype, query.shape[-2], query.shape[-1]
        if fault == "plan of the first dtype":
            first = self.kept.setdefault((query.shape, key.shape), dtype)
            query, key, value = (each.astype(first).astype(dtype) for each in (query, key, value))
        if fault in INPUTS:
            call = Call(query, key, value, mask, is_causal, scale)
            call = replace(call, **INPUTS[fault][1](call))
            query, key, value, mask, is_causal, scale, _ = vars(call).values()
        key, value = (np.repeat(each, query.shape[1] // each.shape[1], axis=1) for each in (key, value))
        scale = width**-0.5 if scale is None else scale
        allowed = self.allowed(query, key, mask, is_causal)
        wide = np.float64 if dtype == np.float64 else np.float32
        q, k, v = (each.astype(wide) for each in (query, key, value))
        if fault == "query in 8 bits":
            q = (q.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) if wide == np.float32 else q
        output = np.empty(q.shape[:-1] + v.shape[-1:], wide)
        stop = rows - rows % BLOCK if fault == "last rows unwritten" and rows > BLOCK else rows
        output[..., :stop, :] = self.rows(q * np.asarray(scale, wide), k, v, allowed)[..., :stop, :]
        return output.astype(dtype)

    def allowed(self, query, key, mask, is_causal):
        fault, (rows, columns) = self.fault, (query.shape[-2], key.shape[-2])
        full = (*query.shape[:-1], columns)
        allowed = np.ones(full, bool)
        if mask is not None:
            mask = np.broadcast_to(mask, full)
            first = {"mask of the first head": 1, "mask of the first sample": 0, "mask of the first query": 2}.get(
                fault
            )
            mask = mask if first is None else np.broadcast_to(np.take(mask, [0], axis=first), full)
            if fault == "mask of the first head from 64":
                mask = np.concatenate([mask[..., :64, :], np.broadcast_to(mask[:, :1], full)[..., 64:, :]], axis=-2)
            allowed = allowed & mask
        if is_causal:
            at, of = np.arange(rows)[:, None], np.arange(columns)[None, :]
            shift = {
                "future key": 1, "no key at the position": -1, "future key from 64": at >= 64,
                "future key from 256": at >= 256,
                "future block": BLOCK - 1 - at % BLOCK, "bottom right": columns - rows,
                "bottom right of more keys alone": max(columns - rows, 0),
            }.get(fault, 0)  # fmt: skip
            allowed = allowed & (of <= at + shift)
        lost = {
            "last key lost": columns - 1, "ragged block lost": columns // BLOCK * BLOCK if columns > BLOCK else columns,
            "decoding loses the first key of a block": columns - (rows == 1 and columns % BLOCK == 1),
            "first blocks alone": 2 * BLOCK, "keys beyond 16 bits": 2**16 - 1,
        }.get(fault, columns)  # fmt: skip
        if lost < columns and columns > 1:
            allowed = allowed & (np.arange(columns) < lost)
        return allowed

    def rows(self, query, key, value, allowed):
        fault, wide = self.fault, query.dtype
        clean = value if fault in LEAKS else np.where(np.isfinite(value), value, 0)
        top = np.full((*query.shape[:-1], 1), -5e4 if fault == "finite lowest score" else -np.inf, wide)
        total, output = np.zeros_like(top), np.zeros((*query.shape[:-1], value.shape[-1]), wide)
        for start in range(0, key.shape[-2], 2048 if key.shape[-2] > 4096 else BLOCK):
            at = slice(start, start + (2048 if key.shape[-2] > 4096 else BLOCK))
            keys = key[..., at, :] if fault in LEAKS else np.where(self.seen(allowed, at), key[..., at, :], 0)
            scores = query @ np.swapaxes(keys, -1, -2)
            if self.bias is not None:
                scores = scores + np.broadcast_to(self.bias, allowed.shape)[..., at]
            scores = self.narrow(scores) if fault == "scores in 16 bits" else scores
            low = np.asarray(-1e9 if fault == "mean of a masked row" else -np.inf, wide)
            scores = np.where(allowed[..., at], scores, low)
            here = scores.max(axis=-1, keepdims=True)
            if fault == "stops at a low block" and start and (here < top - 20).any():
                break
            new = np.maximum(top, here)
            if fault == "one maximum for all samples":
                new = np.maximum(new, new.max(axis=0, keepdims=True))
            if fault == "one maximum for all heads":
                new = np.maximum(new, new.max(axis=1, keepdims=True))
            is_lost = fault == "no maximum" or (fault == "decoding without the maximum" and query.shape[-2] == 1)
            new = np.zeros_like(new) if is_lost else new
            shift = new if fault == "nan of a masked row" else np.where(np.isfinite(new), new, 0)
            factor = 1 if fault == "old maximum" else np.exp(np.where(np.isfinite(top), top - shift, -np.inf))
            weights = np.exp(scores - shift)
            weights = self.narrow(weights, 2.0**-4) if fault == "weights of 4 bits" else weights
            weights = weights if self.narrow_to is None else weights.astype(self.narrow_to).astype(wide)
            total = total * factor + weights.sum(axis=-1, keepdims=True)
            output, top = output * factor + weights @ clean[..., at, :], new
            output = self.narrow(output) if fault == "sums in 16 bits" else output
        if fault == "not divided":
            return output
        with np.errstate(all="ignore"):
            output = output / (total if fault == "nan of a masked row" else np.where(total > 0, total, 1))
        if LEAKS.get(fault) is not None:
            output = output + 0 * output.sum(axis=LEAKS[fault], keepdims=True)
        return output if fault in LEAKS else self.with_nonfinite(output, query, key, value, allowed)

    def seen(self, allowed, at):
        return np.expand_dims(allowed[..., at].any(axis=-2), -1)

    def narrow(self, array, step=None):
        return np.round(array / step) * step if step else array.astype(np.float16).astype(array.dtype)

    def with_nonfinite(self, output, query, key, value, allowed):
        """Attended NaN and infinities, and those alone."""
        if all(np.isfinite(each).all() for each in (query, key, value)):
            return output
        through = allowed.astype(output.dtype)
        for number, found in ((np.inf, value == np.inf), (-np.inf, value == -np.inf), (np.nan, np.isnan(value))):
            output = np.where(through @ found.astype(output.dtype) > 0, number, output)
        unknown = (allowed & np.expand_dims(~np.isfinite(key).all(axis=-1), -2)).any(axis=-1, keepdims=True)
        unknown |= allowed.any(axis=-1, keepdims=True) & ~np.isfinite(query).all(axis=-1, keepdims=True)
        return np.where(unknown, np.nan, output)


LEAKS = {"nan leaks": None, "nan leaks to all channels": -1, "nan leaks to all heads": 1, "nan leaks to all samples": 0}


@dataclass
class Call:
    """The arguments of a call, and its number."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    mask: np.ndarray | None
    is_causal: bool
    scale: float | None
    number: int = 0

    def has_mask(self, *dims):
        """Whether there is a mask, of so many samples, heads, queries and keys; 0 stands for any number."""
        told = () if self.mask is None else zip(dims, self.mask.shape, strict=False)
        return self.mask is not None and all(want in (0, size) for want, size in told)

    def seen(self, shift=0):
        """Causality off by some keys, and the mask."""
        rows = np.tri(self.query.shape[-2], self.key.shape[-2], shift, dtype=bool)[None, None]
        return rows if self.mask is None else self.mask & rows


def read(x):
    """The memory of an array from the start of its buffer on, as if it were contiguous."""
    return np.ravel(x.base)[: x.size].reshape(x.shape)


def in_turn(call):
    size = call.query.shape[1] // call.key.shape[1]
    return {"key": np.tile(call.key, (1, size, 1, 1)), "value": np.tile(call.value, (1, size, 1, 1))}


def among(x, count, axis):
    """An array whose indices along an axis are counted up to some number."""
    return np.take(x, np.arange(x.shape[axis]) % count, axis=axis)


def narrowed(call, width):
    """Channels up to a multiple of 32."""
    return {"query": put(call.query, AT[..., width // 32 * 32 :], 0)} if call.query.shape[-1] == width else {}


def lost(part):
    return lambda output, call: put(output, part, 0)


INPUTS = {
    # fault: the case that shows it, and what becomes of the arguments
    "a lone sample has the mask of one head": ("shape-20x34-b3-h3on3-maskbhm-parts", lambda c: {"mask": c.mask[:, :1]} if c.has_mask() and len(c.query) == 1 else {}),
    "the first mask in a large batch": ("batch-invariance", lambda c: {"mask": among(c.mask, 1, 0)} if c.has_mask() and len(c.query) > 5 else {}),
    "8 bits count the samples": ("shape-2x3-b270-h1on1-d16-plain", lambda c: {"key": among(c.key, 256, 0), "value": among(c.value, 256, 0)}),
    "8 bits count the heads": ("shape-3x5-b1-h258on2-d16-plain", lambda c: {"query": among(c.query, 256, 1)}),
    "a stride of 0 taken for contiguous": ("shape-18x34-plain-expandedquery", lambda c: {"query": put(c.query, AT[1:], 0)} if 0 in c.query.strides else {}),
    "a mask's stride of 0 taken for contiguous": ("shape-18x34-mask-expandedmask", lambda c: {"mask": put(c.mask, AT[1:], ~c.mask[1:])} if c.has_mask() and 0 in c.mask.strides[:1] else {}),
    "contiguous query taken for granted": ("shape-18x34-h3on3-plain-permutedquery", lambda c: {"query": np.ravel(c.query, "K").reshape(c.query.shape)}),
    "contiguous key taken for granted": ("shape-18x34-h3on3-plain-permutedkey", lambda c: {"key": np.ravel(c.key, "K").reshape(c.key.shape)}),
    "contiguous value taken for granted": ("shape-18x34-h3on3-plain-permutedvalue", lambda c: {"value": np.ravel(c.value, "K").reshape(c.value.shape)}),
    "reads past a stride": ("shape-18x34-h3on3-plain-stridedvalue", lambda c: {"value": np.repeat(c.value, 2, axis=-1)[..., : c.value.shape[-1]]} if c.value.strides[-1] != c.value.itemsize else {}),
    "reads the buffer from its start": ("shape-18x34-h3on3-plain-offset", lambda c: {"key": read(c.key)} if c.key.base is not None and c.key.base.ndim == 1 else {}),
    "reads past the part of the cache": ("shape-18x34-h3on3-plain-part", lambda c: {"value": read(c.value)} if c.value.base is not None and c.value.base.shape[-2:] != c.value.shape[-2:] else {}),
    "heads in turn": ("grouped-heads", in_turn),
    "first key head": ("grouped-heads", lambda c: {"key": among(c.key, 1, 1), "value": among(c.value, 1, 1)}),
    "keys of the first sample": ("shape-31x31-d80-plain", lambda c: {"key": among(c.key, 1, 0)}),
    "width beyond 128": ("shape-40x40-d256-plain", lambda c: {"query": put(c.query, AT[..., 128:], 0)}),
    "key heads in turn for groups of 4": ("shape-65x200-b1-h8on2-d64-maskbh-permuted-scaled", lambda c: in_turn(c) if c.query.shape[1] == 4 * c.key.shape[1] and c.query.shape[2] > 1 else {}),
    "key heads in turn for one sample": ("shape-33x33-b1-h10on5-d128-causal-permuted-high", lambda c: in_turn(c) if len(c.query) == 1 else {}),
    "no causality for groups of 4": ("shape-256x256-b1-h8on2-d64-causal-high", lambda c: {"is_causal": False} if c.query.shape[1] == 4 * c.key.shape[1] and c.query.shape[2] > 1 else {}),
    "no causality from the third sample on": ("shape-65x200-b5-h1on1-d64-causal-scaled", lambda c: {"mask": c.seen() | ((np.arange(len(c.query)) > 1)[:, None, None, None] & (True if c.mask is None else c.mask)), "is_causal": False} if c.is_causal else {}),
    "one key of the future in whole blocks of 256": ("shape-256x256-b1-h8on2-d64-causal-high", lambda c: {"mask": c.seen(1), "is_causal": False} if c.is_causal and c.query.shape[2] == c.key.shape[2] == 256 else {}),
    "mask of the first head for all samples": ("shape-128x128-b1-h10on5-d64-maskhm-permuted-scaled", lambda c: {"mask": c.mask[:, :1]} if c.has_mask(1, c.query.shape[1]) else {}),
    "mask of keys of the first head": ("shape-65x200-b1-h8on2-d64-maskbh-permuted-scaled", lambda c: {"mask": c.mask[:, :1]} if c.has_mask(0, 0, 1) and c.query.shape[2] > 1 else {}),
    "mask of one sample for two alone": ("shape-70x130-b3-h3on3-maskm", lambda c: {"mask": put(np.repeat(c.mask, len(c.query), axis=0), AT[2:], True)} if c.has_mask(1) else {}),
    "mask of queries ignored": ("mask-of-queries", lambda c: {"mask": None} if c.has_mask(0, 0, 0, 1) else {}),
    "decoding loses the mask of heads": ("shape-1x129-b5-h8on2-d128-maskhm-permuted-scaled-high", lambda c: {"mask": c.mask[:, :1]} if c.has_mask() and c.query.shape[2] == 1 else {}),
    "decoding ignores the mask": ("shape-1x66-plain-hidden", lambda c: {"mask": None} if c.query.shape[2] == 1 else {}),
    "stated scale lost in decoding": ("shape-1x129-b1-h10on5-d64-plain-part-scaled-high", lambda c: {"scale": None} if c.query.shape[2] == 1 else {}),
    "a part of a cache taken for contiguous in decoding": ("shape-1x129-b1-h10on5-d64-plain-part-scaled-high", lambda c: {"value": read(c.value)} if c.query.shape[2] == 1 and c.value.base is not None else {}),
    "the end of 40 channels lost": ("shape-33x33-d40-plain", lambda c: narrowed(c, 40)),
    "the end of 48 channels lost": ("shape-20x20-d48-mask", lambda c: narrowed(c, 48)),
    "the end of 112 channels lost": ("shape-65x65-d112-causal", lambda c: narrowed(c, 112)),
    "mask ignored": ("mask", lambda c: {"mask": None}),
    "inverted mask": ("mask", lambda c: {"mask": ~c.mask} if c.has_mask() else {}),
    "mask hides causality": ("shape-130x130-ragged", lambda c: {"is_causal": c.is_causal and not c.has_mask()}),
    "causality ignored": ("shape-13x13-causal", lambda c: {"is_causal": False}),
    "scale ignored": ("scale", lambda c: {"scale": None}),
    "sign of the scale lost": ("negative-scale", lambda c: {"scale": c.scale and abs(c.scale)}),
    "no scale": ("shape-13x13-causal", lambda c: {"scale": 1.0}),
    "scale of 64": ("shape-31x31-d80-plain", lambda c: {"scale": 0.125}),
}  # fmt: skip

OUTPUTS = {
    # fault: the case that shows it, and what becomes of the output
    "zeros": ("mask", lambda o, c: np.zeros_like(o)),
    "last query lost": ("shape-31x31-d80-plain", lost(AT[..., -1:, :])),
    "query 512 lost": ("shape-530x530-b1-h1on1-d16-causal", lost(AT[..., 512:513, :])),
    "rows beyond 16 bits": ("shape-66000x3-b1-h1on1-d16-plain", lost(AT[..., 2**16 - 1 :, :])),
    "masks before a negative scale": ("negative-scale-causal", lambda o, c: o * np.nan if c.is_causal and (c.scale or 1) < 0 else o),
    "output of 10 bits": ("shape-31x31-d80-plain", lambda o, c: o.astype(np.float16).astype(o.dtype)),
    "other shape": ("shape-65x65-plain", lambda o, c: o[..., :64, :] if o.shape[-2] == 65 else o),
    "other dtype": ("shape-31x31-d80-plain", lambda o, c: o.astype(np.float64) if o.shape[-2] > 1 else o),
    "NaN of one sample for all": ("nan-sample-among-others", lambda o, c: o + 0 * o.sum(axis=(0, 1, 2))),
    "NaN of one head for all": ("nan-head-among-others", lambda o, c: o + 0 * o.sum(axis=1, keepdims=True)),
    "other bits in one call of eight": ("twice", lambda o, c: o * np.asarray(1 + (c.number % 8 == 7) * 2.0**-22, o.dtype)),
    "bits that vary from 128 queries on": ("shape-200x200-d64-plain-again", lambda o, c: o * np.asarray(1 + (o.shape[-2] >= 128) * (c.number % 3) * 2.0**-23, o.dtype)),
}  # fmt: skip

FORWARD = {
    # fault: the case that shows it
    **{fault: case for fault, (case, _) in (INPUTS | OUTPUTS).items()},
    "decoding without the maximum": "shape-1x256-b5-h1on1-d64-plain-part-high",
    "mask of the first head": "shape-70x130-h3on3-maskbhm",
    "mask of the first sample": "shape-70x130-h3on3-maskb",
    "mask of the first query": "mask",
    "future key": "shape-13x13-causal",
    "no key at the position": "shape-13x13-causal",
    "future key from 64": "shape-128x128-d64-causal",
    "future block": "shape-65x65-d64-causal",
    "last key lost": "shape-31x31-d80-plain",
    "ragged block lost": "shape-65x65-plain",
    "first blocks alone": "shape-300x300-d64-plain",
    "last rows unwritten": "shape-65x65-plain",
    "old maximum": "shape-128x128-plain",
    "no maximum": "scores-above-100",
    "finite lowest score": "scores-below-the-sentinel",
    "not divided": "shape-31x31-d80-plain",
    "nan leaks to all channels": "masked-nan-value",
    "nan leaks to all heads": "nan-head-among-others",
    "nan leaks to all samples": "nan-sample-among-others",
    "query in 8 bits": "shape-31x31-d80-plain",
    "scores in 16 bits": "shape-31x31-d80-plain",
    "weights of 4 bits": "shape-31x31-d80-plain",
    "sums in 16 bits": "average-32768",
    "causality kept by queries": "after-shorter",
    "keys in another order each call": "shape-200x200-d64-plain-again",
    "kept by shape": "shape-33x33-plain-again",
    "kept by mask's shape": "after-other-mask",
    "kept by address": "shape-20x34-plain-rewritten",
    "plan of the first strides": "after-other-memory",
    "keeps all memory": "memory-is-freed",
    "one buffer for all results": "shape-20x34-plain-again",
    "adds to an old buffer": "twice",
    "scales the query in place": "shape-13x13-causal",
    "the value itself": "shape-13x13-causal",
    "future key from 256": "shape-300x300-causal",
    "decoding loses the first key of a block": "decoding-equals-prefill",
    "stops at a low block": "reordered-keys",
    "one maximum for all samples": "large-sample-among-others",
    "one maximum for all heads": "large-head-among-others",
    "mask of the first head from 64": "shape-70x130-h3on3-maskbhm",
    "plan of the first dtype": "after-other-dtype",
    "clears the row after the cache": "shape-18x34-h3on3-plain-part",
    "keys beyond 16 bits": "shape-2x66000-b1-h1on1-d16-plain",
}
"""Faults of the forward pass, each with the case that has to show it."""

CONVENTIONS = {
    "bottom right": ("causal-more-keys", "bottom-right-causal"),
    "mean of a masked row": ("empty-row-mask", "mean-of-masked-row"),
    "nan of a masked row": ("empty-row-mask", "nan-of-masked-row"),
    "nan leaks": ("masked-nan-value", "nan-through-mask"),
}


class Backward:
    """The second of a pair: gradients from the output and the logsumexp, with one fault by its name."""

    def __init__(self, fault=""):
        self.fault, self.old = fault, {}

    def __call__(self, d_output, query, key, value, output, logsumexp, mask=None, is_causal=False, scale=None):
        fault, dtype, kernel = self.fault, query.dtype, Kernel("")
        size = query.shape[1] // key.shape[1]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if fault == "contiguous cotangent taken for granted":
            d_output = np.ravel(d_output, "K").reshape(d_output.shape)
        if fault == "cotangent of the first row" and 0 in d_output.strides:
            d_output = np.zeros_like(d_output) + d_output[..., :1, :]
        if fault == "query of the last forward call":
            query = LAST["query"]
        if fault == "a cotangent's stride taken for 1" and d_output.strides[-1] != d_output.itemsize:
            d_output = d_output[..., ::-1]
        if fault == "reads the buffer of the cotangent" and d_output.base is not None and d_output.base.ndim == 1:
            d_output = d_output.base[: d_output.size].reshape(d_output.shape)
        do, q, o = (each.astype(np.float32) for each in (d_output, query, output))
        k, v = (np.repeat(each, size, axis=1).astype(np.float32) for each in (key, value))
        shown = None if fault == "backward ignores the mask" else mask
        if fault == "backward has the mask of the first head" and mask is not None:
            shown = mask[:, :1]
        allowed = kernel.allowed(q, k, shown, is_causal and fault != "backward ignores causality")
        if fault == "backward ignores causality next to a mask" and mask is not None:
            allowed = kernel.allowed(q, k, shown, False)
        if fault == "backward sees the future from 64":
            allowed = Kernel("future key from 64").allowed(q, k, shown, is_causal)
        q, k, v, o = (np.where(np.isfinite(each), each, 0) for each in (q, k, v, o))
        lse = logsumexp[..., None].astype(np.float16 if fault == "logsumexp of 10 bits" else np.float32)
        with np.errstate(all="ignore"):
            weights = np.where(allowed, np.exp(scale * q @ np.swapaxes(k, -1, -2) - lse), 0)
        if fault == "nan of masked rows":
            weights = np.exp(np.where(allowed, scale * q @ np.swapaxes(k, -1, -2), -np.inf) - lse)
        delta = (do * o).sum(axis=-1, keepdims=True) * (fault != "no delta")
        factor = {"no scale backward": 1, "sign of the scale lost backward": abs(scale)}.get(fault, scale)
        d_scores = weights * (do @ np.swapaxes(v, -1, -2) - delta) * factor
        found = [d_scores @ k, np.swapaxes(d_scores, -1, -2) @ q, np.swapaxes(weights, -1, -2) @ do]
        if fault == "key and value gradients swapped":
            found = [found[0], found[2], found[1]]
        batch, heads, rows, width = key.shape
        grouped = [each.reshape(batch, heads, size, rows, width) for each in found[1:]]
        found[1:] = [each[:, :, 0] if fault == "first head of a group" else each.sum(axis=2) for each in grouped]
        if fault == "adds to old gradients":
            found[1] = found[1] + self.old.get(key.shape, 0)
            self.old[key.shape] = found[1].copy()
        if fault == "last block without gradient" and rows > BLOCK:
            found[1][..., rows // BLOCK * BLOCK :, :] = 0
        if fault == "gradients of two samples":
            found = [np.where(np.arange(len(each))[:, None, None, None] < 2, each, 0) for each in found]
        if fault == "value gradient of as many queries as keys":
            found[2] = np.swapaxes(weights[..., :rows, :], -1, -2) @ do[..., :rows, :]
        if fault == "gradients of 10 bits":
            found[2] = found[2].astype(np.float16)
        return tuple(each.astype(dtype) for each in found)


LAST = {}
"""What the last forward call got, as a kernel with one buffer would keep it."""


def forward(query, key, value, mask=None, is_causal=False, scale=None):
    """The first of the pair: the output, and the logsumexp of the scores."""
    kernel, LAST["query"] = Kernel(), query
    output = kernel(query, key, value, mask, is_causal, scale)
    k = np.repeat(key, query.shape[1] // key.shape[1], axis=1).astype(np.float32)
    allowed = kernel.allowed(query, k, mask, is_causal)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * query.astype(np.float32) @ np.swapaxes(np.nan_to_num(k), -1, -2)
    scores = np.where(allowed, scores, -np.inf)
    top = scores.max(axis=-1, initial=-np.inf)
    shift = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
        logsumexp = shift + np.log(np.exp(scores - shift[..., None]).sum(axis=-1))
    unknown = np.isnan(output).all(axis=-1) & (output.shape[-1] > 0)
    return output, np.where(unknown, np.nan, logsumexp).astype(np.float32)


BACKWARD = {
    "contiguous cotangent taken for granted": "shape-18x34-h3on3-plain-permuted-gradient",
    "cotangent of the first row": "gradient-memory-cotangent-expanded",
    "backward ignores the mask": "gradient-empty-lengths",
    "backward ignores causality": "gradient-causal",
    "backward ignores causality next to a mask": "shape-130x130-ragged-gradient",
    "backward sees the future from 64": "shape-129x129-causal-gradient",
    "logsumexp of 10 bits": "shape-5x5-d16-plain-gradient",
    "nan of masked rows": "gradient-empty-row",
    "no delta": "gradient",
    "no scale backward": "gradient",
    "sign of the scale lost backward": "gradient-negative-scale",
    "backward has the mask of the first head": "shape-70x130-h3on3-maskbhm-gradient",
    "key and value gradients swapped": "gradient",
    "first head of a group": "gradient-grouped",
    "adds to old gradients": "gradient-twice",
    "last block without gradient": "shape-129x129-causal-gradient",
    "gradients of 10 bits": "gradient",
    "gradients of two samples": "shape-20x34-b5-lengths-gradient",
    "value gradient of as many queries as keys": "shape-130x34-plain-gradient",
    "query of the last forward call": "gradient-after-other-forward",
    "reads the buffer of the cotangent": "shape-18x34-plain-offset-gradient",
    "a cotangent's stride taken for 1": "shape-18x34-plain-strided-gradient",
}


TAKES = {
    "backend": "numpy",
    "layout": "BHSD",
    "mask": "keep",
    "mask_name": "mask",
    "causal": "top-left",
    "default_scale": "sqrt",
    "grouped": True,
    "same_width": False,
    "mask_with_causal": True,
    "full_mask": False,
    "keeps_dtype": True,
    "keeps_library": True,
    "returns": ("output",),
    "dtypes": ("float32",),
    "differentiates": False,
    "bias_name": "",
}


def found(kernel, *cases, dtype="float32", **options):
    """The result of each case, by its name."""
    return {x.case: x for x in check_subject(kernel, cases=cases, dtypes=[dtype], **{"power": False} | options)}


def verdict_of(kernel, case, **options):
    """The verdict of a case, and the name of what the answer equals."""
    result = found(kernel, case, **options)[case]
    return result.verdict, result.variant
