"""Options of attention by name, in any sizes: what is tested under each of them is tested under all."""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import numpy as np

import attention_core as ac
from attention_core._arrays import take_rows
from attention_core.backend import array_namespace
from attention_core.scores import ScoreMod, alibi, relative_bias


class Sizes(NamedTuple):
    """Those of query (..., H, M, D), key (..., G, N, D) and value (..., G, N, E)."""

    leading: tuple[int, ...] = (3,)
    heads: int = 4
    groups: int = 2
    rows: int = 11
    columns: int = 13
    width: int = 5
    value_width: int = 6

    def arrays(self, rng):
        """Query, key and value."""
        shapes = (self.heads, self.rows, self.width), (self.groups, self.columns, self.width)
        shapes += ((self.groups, self.columns, self.value_width),)
        return [rng.standard_normal((*self.leading, *each)) for each in shapes]

    def pairs(self, axes):
        """The shape of a mask or bias: "bhmn", or some of these axes."""
        sizes = {"h": self.heads, "m": self.rows, "n": self.columns}
        dims = [size if axis in axes else 1 for axis, size in sizes.items()]
        return (*self.leading, *dims) if "b" in axes else tuple(dims)


@dataclasses.dataclass(frozen=True, eq=False)
class Phased(ac.Mask):
    """A rule of a user's own: numbers, arrays of two kinds, and another rule."""

    stride: int
    phases: Any
    shifts: Any
    inner: ac.Mask
    axes: ClassVar[dict[str, int]] = {"phases": 1}

    def allowed(self, at, /, *, xp):
        phases = xp.astype(take_rows(self.phases, xp.reshape(at.query, (-1,)), axis=-1, xp=xp), xp.int32)
        shifts = xp.astype(self.shifts, xp.int32)
        if len(phases.shape) > 1:  # an axis for heads
            phases = xp.expand_dims(phases, axis=-2)
        if len(shifts.shape):
            shifts = xp.reshape(shifts, (*shifts.shape, 1, 1, 1))
        behind = xp.add(xp.subtract(at.key, xp.expand_dims(phases, axis=-1)), shifts)
        return xp.logical_and(xp.not_equal(xp.remainder(behind, self.stride), 0), self.inner.allowed(at, xp=xp))


def curved(scores, batch, head, query, key, weight, table, places):
    """A score modification of all positions, with arrays of floating point and of integers."""
    xp = array_namespace(scores)
    distance = xp.subtract(xp.add(key, head), xp.add(query, batch))
    steepness = xp.add(xp.astype(distance, scores.dtype), xp.astype(places[0], scores.dtype))
    change = xp.multiply(xp.multiply(steepness, 0.1), xp.astype(weight, scores.dtype))
    return xp.add(xp.multiply(scores, xp.astype(table[1], scores.dtype)), change)


def quadratic(scores, batch, head, query, key):
    xp = array_namespace(scores)
    return xp.subtract(scores, xp.multiply(xp.multiply(scores, scores), 0.1))


def behind(scores, batch, head, query, key):
    """Minus infinity for later keys: whole blocks and pieces of it."""
    return array_namespace(scores).where(query >= key, scores, -math.inf)


def age_logarithm(scores, batch, head, query, key):
    """What is nan, or -inf, where the key comes after the query."""
    xp = array_namespace(scores)
    age = xp.astype(xp.subtract(query, key), scores.dtype)
    return xp.add(scores, xp.where(xp.less(age, 0.0), math.nan, age))


def root(scores, batch, head, query, key):
    """A function without a derivative at 0, which stands for a masked score."""
    xp = array_namespace(scores)
    return xp.multiply(xp.sign(scores), xp.sqrt(xp.abs(scores)))


class Maker:
    """Arrays of options: drawn, and put to a library."""

    def __init__(self, sizes, put, rng):
        self.sizes, self.put, self.rng = sizes, put, rng

    def floats(self, axes, infinite=False):
        numbers = self.rng.standard_normal(self.sizes.pairs(axes))
        return self.put(np.where(self.rng.random(numbers.shape) < 0.3, -math.inf, numbers) if infinite else numbers)

    def flags(self, axes):
        return self.put(self.rng.random(self.sizes.pairs(axes)) < 0.6)

    def numbers(self, *values, dtype="int64"):
        """One for each sample: these in turn."""
        samples = math.prod(self.sizes.leading)
        return self.put(np.resize(np.asarray(values, dtype), samples).reshape(self.sizes.leading))

    def ids(self, length, *leading):
        return self.put(np.sort(self.rng.integers(0, 4, (*leading, length)), axis=-1))

    def array(self, *values):
        return self.put(np.asarray(*values))

    def curve(self):
        return ScoreMod(curved, (self.array(0.7), self.array([0.2, -1.3]), self.array([2, 5])))


RULES = {
    "causal later": lambda of, m, n: ac.Causal(offset=2),
    "causal earlier": lambda of, m, n: ac.Causal(offset=-5),
    "causal of nothing": lambda of, m, n: ac.Causal(offset=-40),
    "causal of all": lambda of, m, n: ac.Causal(offset=n),
    "causal to the end": lambda of, m, n: ac.Causal(offset=n - m),
    "one offset": lambda of, m, n: ac.Causal(offset=of.array(-2)),
    "offsets": lambda of, m, n: ac.Causal(offset=of.numbers(0, 3, -4)),
    "offsets to the end": lambda of, m, n: ac.Causal(offset=of.numbers(n - m, 2, -m)),
    "offsets beyond": lambda of, m, n: ac.Causal(offset=of.numbers(2**31 - 1, -(2**31), 2**31 - 5)),
    "offsets of int32 beyond": lambda of, m, n: ac.Causal(offset=of.numbers(2**31 - 1, -(2**31), dtype="int32")),
    "window": lambda of, m, n: ac.SlidingWindow(left=2, right=1),
    "window at the end": lambda of, m, n: ac.SlidingWindow(left=12, right=0, offset=n - m),
    "window far ahead": lambda of, m, n: ac.SlidingWindow(left=1, right=1, offset=9),
    "window beyond": lambda of, m, n: ac.SlidingWindow(left=5, offset=of.numbers(2**31 - 5, -(2**31), dtype="int32")),
    "window beyond to the right": lambda of, m, n: ac.SlidingWindow(
        right=5, offset=of.numbers(2**31 - 1, dtype="int32")
    ),
    "window to the right": lambda of, m, n: ac.SlidingWindow(right=3, offset=2),
    "windows": lambda of, m, n: ac.SlidingWindow(left=3, offset=of.numbers(0, n - m, -4)),
    "windows of two sides": lambda of, m, n: ac.SlidingWindow(left=9, right=0, offset=of.numbers(7, n - m, 0)),
    "length": lambda of, m, n: ac.KeyLengths(n // 2),
    "length of all": lambda of, m, n: ac.KeyLengths(n + 5),
    "no keys": lambda of, m, n: ac.KeyLengths(0),
    "lengths": lambda of, m, n: ac.KeyLengths(of.numbers(n, 0, n // 2, n + 3)),
    "lengths of uint8": lambda of, m, n: ac.KeyLengths(of.numbers(n // 3, n // 2, dtype="uint8")),
    "equal lengths": lambda of, m, n: ac.KeyLengths(of.numbers(n // 2)),
    "one length": lambda of, m, n: ac.KeyLengths(of.array(n // 2)),
    "cache": lambda of, m, n: ac.Causal(offset=of.numbers(2, n // 2, 0)) & ac.KeyLengths(of.numbers(3, n, m)),
    "prompts": lambda of, m, n: ac.Causal(offset=of.numbers(0)) & ac.KeyLengths(of.numbers(m, max(1, m - 2))),
    "segments": lambda of, m, n: ac.Segments(of.ids(m), of.ids(n)),
    "segments of samples": lambda of, m, n: ac.Segments(of.ids(m, *of.sizes.leading), of.ids(n, *of.sizes.leading)),
    "segments shared": lambda of, m, n: ac.Segments(of.ids(m), of.ids(n, *of.sizes.leading)),
    "function": lambda of, m, n: ac.MaskFunction(lambda b, h, q, k: (q + 2 * k + h + b) % 3 > 0),
    "function of an array": lambda of, m, n: ac.MaskFunction(
        lambda b, h, q, k, ends: (q + k) % 3 < ends[2, 1], (of.put(np.asarray([[0, 0], [0, 0], [0, 2]], "int32")),)
    ),
    "and": lambda of, m, n: ac.Causal(offset=1) & ac.SlidingWindow(left=3, right=4),
    "and lengths": lambda of, m, n: ac.KeyLengths(of.numbers(n, 0, n // 2)) & ac.Causal(offset=1),
    "window and lengths": lambda of, m, n: ac.SlidingWindow(left=9, offset=n - m) & ac.KeyLengths(of.numbers(n, 5)),
    "lengths and function": lambda of, m, n: (
        ac.KeyLengths(of.numbers(n // 2, n)) & ac.MaskFunction(lambda b, h, q, k: k != q)
    ),
    "or": lambda of, m, n: ac.Causal(offset=-7) | ac.SlidingWindow(right=0, offset=-2),
    "or lengths": lambda of, m, n: ac.Causal(offset=-3) | ac.KeyLengths(of.numbers(n // 2, n, 0)),
    "one holds the other": lambda of, m, n: ac.KeyLengths(5) | ac.KeyLengths(of.numbers(7, n, 0, 6)),
    "not": lambda of, m, n: ~ac.SlidingWindow(left=4, right=4, offset=of.numbers(0, 3, -4)),
    "not a length": lambda of, m, n: ~ac.KeyLengths(n // 3),
    "of a user": lambda of, m, n: Phased(
        3, of.array(np.arange(m) % 3), of.numbers(0, 1, 5), ac.Causal(offset=3) & ac.KeyLengths(12)
    ),
    "array": lambda of, m, n: of.flags("bhmn"),
    "array of keys": lambda of, m, n: of.flags("n"),
    "array of rows": lambda of, m, n: of.flags("m"),
    "array of samples": lambda of, m, n: of.flags("bn"),
    "array of hidden keys": lambda of, m, n: of.put(
        (np.arange(n) != 5) & ((np.arange(n) + np.arange(of.sizes.heads)[:, None, None]) % 3 > 0)
    ),
    "array of heads": lambda of, m, n: of.flags("hmn"),
    "array in a rule": lambda of, m, n: ac.masks.Given(of.flags("mn")),
    "array and rule": lambda of, m, n: ac.Causal(offset=4) & of.flags("bmn"),
    "rows without a key": lambda of, m, n: of.put((np.arange(m) != 3)[:, None] & (np.arange(n) > n // 3)),
}
"""Masks, as functions of arrays that are made and the numbers of queries and keys."""


def rule(of, name):
    return {"mask": RULES[name](of, of.sizes.rows, of.sizes.columns)}


def sinks(of):
    """One of minus infinity, which takes no share."""
    return of.put(np.where(np.arange(of.sizes.heads) == 1, -math.inf, of.rng.standard_normal(of.sizes.heads)))


OTHERS = {
    "none": lambda of: {},
    "causal": lambda of: {"is_causal": True},
    "scale": lambda of: {"scale": -0.5, "mask": ac.Causal(offset=1)},
    "no scale": lambda of: {"scale": 0.0},
    "number": lambda of: {"scale": of.array(0.8), "is_causal": True},
    "softcap": lambda of: {"softcap": 1.5, "scale": 0.9, "is_causal": True},
    "numbers": lambda of: {"softcap": of.array(1.25), "scale": of.array(0.8), "is_causal": True},
    **{f"bias of {axes}": lambda of, axes=axes: {"bias": of.floats(axes)} for axes in ("bhmn", "hmn", "hm", "mn", "n", "b")},
    "bias with infinities": lambda of: {"bias": of.floats("hmn", infinite=True)},
    "bias of no row": lambda of: {"bias": of.put(np.where(np.arange(of.sizes.rows)[:, None] == 2, -math.inf, np.ones(of.sizes.columns)))},
    "bias of a mask": lambda of: {"bias": of.put(np.where(of.rng.random(of.sizes.columns) < 0.5, -1e30, 0.0))},
    "bias of hidden keys": lambda of: {"bias": of.put(np.where(np.arange(of.sizes.columns) % 3 == 1, -math.inf, 0.5))},
    "bias of hidden keys and lengths": lambda of: {**OTHERS["bias of hidden keys"](of), **rule(of, "lengths")},
    "bias and mask": lambda of: {"bias": of.floats("hn"), "mask": of.flags("bmn")},
    "bias and rule": lambda of: {"bias": of.floats("hn"), "mask": ac.KeyLengths(of.numbers(of.sizes.columns, 0, 6))},
    "causal bias": lambda of: {"bias": of.floats("hn"), "is_causal": True},
    "score_mod": lambda of: {"score_mod": quadratic},
    "score_mod of infinities": lambda of: {"score_mod": behind},
    "score_mod of what is masked": lambda of: {"score_mod": age_logarithm, "is_causal": True},
    "score_mod of a root": lambda of: {"score_mod": root, "mask": ac.Causal()},
    "score_mod with arrays": lambda of: {"score_mod": of.curve(), "softcap": 2.0, "mask": ac.SlidingWindow(left=4)},
    "alibi": lambda of: {"score_mod": alibi(of.sizes.heads, offset=of.numbers(0, 3, -4)), "softcap": 2.0},
    "alibi of a window": lambda of: {"score_mod": alibi(of.sizes.heads), **rule(of, "window at the end")},
    "bias of a cache": lambda of: {"bias": of.floats("hmn"), **rule(of, "cache")},
    "bias of a window": lambda of: {"bias": of.floats("hmn"), **rule(of, "window at the end")},
    "bias of windows": lambda of: {"bias": of.floats("m"), **rule(of, "windows")},
    "relative bias": lambda of: {
        "score_mod": relative_bias(of.put(of.rng.standard_normal((8, of.sizes.heads))), max_distance=9),
        "mask": ac.SlidingWindow(left=9),
    },
    "dropout": lambda of: {"dropout": ac.Dropout(0.3, 2**40 + 5), "mask": ac.Causal(offset=1)},
    "dropout by words": lambda of: {"dropout": ac.Dropout(0.4, of.array([5, 7]))},
    "dropout of a length": lambda of: {"dropout": ac.Dropout(0.4, 3), **rule(of, "length")},
    "no dropout": lambda of: {"dropout": ac.Dropout(0.0, 3)},
    "sinks": lambda of: {"sinks": of.put(of.rng.standard_normal(of.sizes.heads)), "is_causal": True},
    "sinks of a bias": lambda of: {"sinks": sinks(of), **OTHERS["bias of no row"](of)},
    **{f"sinks and {name}": lambda of, name=name: {"sinks": sinks(of), **rule(of, name)} for name in (
        "causal earlier", "lengths", "cache", "function", "rows without a key", "windows", "no keys"
    )},
    "everything": lambda of: {
        "bias": of.floats("hn"),
        "mask": ac.KeyLengths(of.numbers(of.sizes.columns, 0, 6)) & ac.masks.Given(of.flags("bmn")),
        "is_causal": True,
        "softcap": of.array(3.0),
        "score_mod": of.curve(),
        "dropout": ac.Dropout(0.2, 3),
    },
    "everything of a user": lambda of: {
        **rule(of, "of a user"),
        "bias": of.floats("hm"),
        "score_mod": of.curve(),
        "dropout": ac.Dropout(0.1, 4),
    },
}  # fmt: skip
"""All other options."""

NAMES = (*OTHERS, *RULES)


def options_of(name, sizes, put, seed=7):
    """The options of a name, the same numbers for every library."""
    of = Maker(sizes, put, np.random.default_rng(seed))
    return OTHERS[name](of) if name in OTHERS else rule(of, name)


def shows(name):
    """Whether options show what is hidden: functions of scores, and biases that leave it a weight."""
    return "score_mod" in name or name.startswith(("every", "bias of a mask"))


def hide(arrays, options, sizes):
    """NaN in keys and values that no query attends to, and in queries that attend to none."""
    query, key, value = map(np.copy, arrays)
    told = {name: each for name, each in options.items() if name != "dropout"}
    weights = ac.scaled_dot_product_attention(
        query, key, value, **told, implementation="dense", return_weights=True
    ).weights
    of_groups = weights.reshape(*sizes.leading, sizes.groups, -1, sizes.columns)
    unseen = ~(of_groups != 0).any(axis=-2)
    key[unseen], value[unseen] = math.nan, math.inf
    query[~(weights != 0).any(axis=-1)] = math.nan
    return query, key, value
