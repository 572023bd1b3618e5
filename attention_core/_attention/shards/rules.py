"""Masks, functions of scores and dropout by the positions and heads of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from attention_core._arrays import Array, Namespace, on_device_of
from attention_core._attention.shards.splits import Place, own_heads
from attention_core._backend import array_namespace, register
from attention_core.masks import Mask, MaskFunction, Positions, Spans, flatten, unflatten
from attention_core.masks._mask import Band, as_mask, logical_and
from attention_core.masks._tree import leaves
from attention_core.random import Dropout, seed_words
from attention_core.scores import ScoreMod


@dataclass(frozen=True, eq=False)
class QueriesBefore(Mask):
    """A rule for the queries before a position; those from there on pad a shard: fully masked rows."""

    mask: Mask | None
    stop: int

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        inside = xp.logical_and(xp.less(at.query, self.stop), xp.greater_equal(at.key, 0))
        if self.mask is None:
            return inside
        known = at._replace(query=xp.clip(at.query, 0, self.stop - 1))
        return xp.logical_and(inside, self.mask.allowed(known, xp=xp))

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array | bool, Array | bool]:
        some, every = xp.less(query.first, self.stop), xp.less(query.last, self.stop)
        if self.mask is None:
            none = xp.zeros_like(key.first) >= 0
            return xp.logical_and(some, none), xp.logical_and(every, none)
        known = query._replace(**{name: xp.clip(getattr(query, name), 0, self.stop - 1) for name in ("first", "last")})
        other_some, other_every = self.mask.blocks(known, key, xp=xp)
        return logical_and(some, other_some, xp), logical_and(every, other_every, xp)


@dataclass(frozen=True, eq=False)
class HeadsFrom(Mask):
    """A rule for heads of which the first is not 0."""

    mask: Mask
    start: Any
    axes: ClassVar[dict[str, int]] = {"start": 0}

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        return self.mask.allowed(at._replace(head=xp.add(at.head, self.start)), xp=xp)

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array | bool, Array | bool]:
        return self.mask.blocks(query, key, xp=xp)

    def bands(self, leading: tuple[int, ...] | None = None, /) -> list[Band]:
        return [band._replace(is_exact=False) for band in self.mask.bands(leading)]


@dataclass(frozen=True)
class AtOrigin:
    """A function of scores by heads and queries of the whole; a head that is no number is the last array."""

    function: Callable[..., Array]
    head: int | None
    stop: int | None

    def __call__(self, scores: Array, batch: Array, head: Array, query: Array, key: Array, *arrays: Array) -> Array:
        xp = array_namespace(scores)
        start: Any = self.head
        if start is None:
            *arrays, start = arrays  # type: ignore[assignment]
        query = query if self.stop is None else xp.clip(query, 0, self.stop - 1)
        return self.function(scores, batch, xp.add(head, start), query, key, *arrays)


register("shards.QueriesBefore", QueriesBefore)
register("shards.HeadsFrom", HeadsFrom)
register("shards.AtOrigin", AtOrigin)


def score_mod_at(score_mod: Any, *, head: Any = 0, stop: int | None = None) -> Any:
    """A function of scores, or `ScoreMod`, for heads from one on, and queries before a position."""
    if score_mod is None or (isinstance(head, int) and head == 0 and stop is None):
        return score_mod
    function, arrays = (score_mod.function, score_mod.arrays) if isinstance(score_mod, ScoreMod) else (score_mod, ())
    if isinstance(head, int):
        return ScoreMod(AtOrigin(function, head, stop), arrays)
    return ScoreMod(AtOrigin(function, None, stop), (*arrays, head))


def mask_of_heads(mask: Mask | Array | None, here: Place, first: Any, xp: Namespace) -> Mask | Array | None:
    """A mask for the heads of this rank."""
    if mask is None:
        return None
    if not isinstance(mask, Mask):
        return own_heads(mask, here, xp)
    arrays: list[Array] = []
    treedef = flatten(as_mask(mask), arrays)
    for index, leaf in enumerate(leaves(treedef)):
        if leaf.axes == 3:
            arrays[index] = own_heads(arrays[index], here, xp)
    rule: Mask = unflatten(treedef, arrays)
    return HeadsFrom(rule, first) if any(map(_may_ask_for_heads, _kinds(treedef))) else rule


def looks_up_heads(mask: Mask | Array | None) -> bool:
    """Whether a rule of users may look up by heads what `mask_of_heads` would cut by heads."""
    if not isinstance(mask, Mask):
        return False
    arrays: list[Array] = []
    treedef = flatten(mask, arrays)
    is_cut = any(leaf.axes == 3 and has_heads(arrays[leaf.place]) for leaf in leaves(treedef))
    return is_cut and any(
        kind is not tuple and not kind.__module__.startswith("attention_core.") for kind in _kinds(treedef)
    )


def has_heads(x: Array) -> bool:
    """Whether an array (..., H, M, N) has an axis of heads."""
    return len(x.shape) >= 3 and x.shape[-3] != 1


def _kinds(treedef: Any) -> Iterator[type]:
    """The classes of a mask and its parts."""
    if isinstance(treedef, type):
        yield treedef
    elif isinstance(treedef, tuple):
        for branch in treedef:
            yield from _kinds(branch)


def _may_ask_for_heads(kind: type) -> bool:
    return kind is not tuple and (kind is MaskFunction or not kind.__module__.startswith("attention_core."))


def mask_of_queries(mask: Mask | Array | None, stop: int | None) -> Mask | None:
    """A mask over the positions of the whole, for queries before a position."""
    rule = None if mask is None else as_mask(mask)
    return rule if stop is None else QueriesBefore(rule, stop)


def dropout_of_heads(dropout: Dropout | None, first: Any, num_heads: int, like: Array, xp: Namespace) -> Any:
    """Dropout for heads from one on: the seed has two more words, that head and the number of all."""
    if dropout is None or not dropout.rate:
        return dropout
    device = on_device_of(like)
    words = (*seed_words(dropout.seed, xp=xp), first, num_heads)
    parts = [
        xp.asarray([word], dtype=xp.int32, **device) if isinstance(word, int) else xp.reshape(word, (1,))
        for word in words
    ]
    return Dropout(dropout.rate, xp.concat([xp.astype(part, xp.int32) for part in parts]))
