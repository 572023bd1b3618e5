"""Masks, functions of scores and dropout by the positions and heads of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from attention_core._arrays import Array, Namespace, clipped, on_device_of
from attention_core._attention.shards.splits import Place, own_heads
from attention_core._backend import array_namespace, register
from attention_core._trees import classes, leaves
from attention_core.masks import Mask, Positions, Spans, flatten, unflatten
from attention_core.masks._band import LIMIT, Band, intersection
from attention_core.masks._mask import as_mask, bounds_of, logical_and
from attention_core.masks._tree import is_of_users, may_count
from attention_core.random import Dropout, seed_words
from attention_core.scores import ScoreMod


@dataclass(frozen=True, eq=False)
class Within(Mask):
    """A rule for the first queries and keys; those behind them pad shards, and are masked."""

    mask: Mask | None
    queries: int
    keys: int

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        inside = xp.logical_and(xp.less(at.query, self.queries), xp.less(at.key, self.keys))
        if self.mask is None:
            return inside
        query, key = clipped(at.query, self.queries, xp=xp), clipped(at.key, self.keys, xp=xp)
        return xp.logical_and(inside, self.mask.allowed(at._replace(query=query, key=key), xp=xp))

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array | bool, Array | bool]:
        some, every = (
            xp.logical_and(xp.less(getattr(query, end), self.queries), xp.less(getattr(key, end), self.keys))
            for end in ("first", "last")
        )
        if self.mask is None:
            return some, every
        known = (
            span._replace(
                **{
                    name: clipped(getattr(span, name), count, xp=xp)
                    for name in ("first", "last", "at")
                    if getattr(span, name) is not None
                }
            )
            for span, count in ((query, self.queries), (key, self.keys))
        )
        other_some, other_every = self.mask.blocks(*known, xp=xp)
        return logical_and(some, other_some, xp), logical_and(every, other_every, xp)

    def bounds(self) -> Band:
        return intersection(bounds_of(self.mask), Band(stop=self.keys))


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

    def bounds(self) -> Band:
        return self.mask.bounds()._replace(is_exact=False)


@dataclass(frozen=True)
class AtOrigin:
    """A function of scores by heads and queries of the whole; a head that is no number is the last array."""

    function: Callable[..., Array]
    head: int | None
    queries: int
    keys: int

    def __call__(self, scores: Array, batch: Array, head: Array, query: Array, key: Array, *arrays: Array) -> Array:
        xp = array_namespace(scores)
        start: Any = self.head
        if start is None:
            *arrays, start = arrays  # type: ignore[assignment]
        query, key = clipped(query, self.queries, xp=xp), clipped(key, self.keys, xp=xp)
        return self.function(scores, batch, xp.add(head, start), query, key, *arrays)


register("shards.Within", Within)
register("shards.HeadsFrom", HeadsFrom)
register("shards.AtOrigin", AtOrigin)


def score_mod_at(score_mod: Any, *, head: Any = 0, queries: int = LIMIT, keys: int = LIMIT) -> Any:
    """A function of scores, or `ScoreMod`, for heads from one on, and the first queries and keys."""
    if score_mod is None or (isinstance(head, int) and head == 0 and queries == keys == LIMIT):
        return score_mod
    function, arrays = (score_mod.function, score_mod.arrays) if isinstance(score_mod, ScoreMod) else (score_mod, ())
    if isinstance(head, int):
        return ScoreMod(AtOrigin(function, head, queries, keys), arrays)
    return ScoreMod(AtOrigin(function, None, queries, keys), (*arrays, head))


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
    return HeadsFrom(rule, first) if may_count(treedef) else rule


def looks_up_heads(mask: Mask | Array | None) -> bool:
    """Whether a rule of users may look up by heads what `mask_of_heads` would cut by heads."""
    if not isinstance(mask, Mask):
        return False
    arrays: list[Array] = []
    treedef = flatten(mask, arrays)
    of_scores = [arrays[leaf.place] for leaf in leaves(treedef) if leaf.axes == 3]
    is_cut = any(len(x.shape) >= 3 and x.shape[-3] != 1 for x in of_scores)
    return is_cut and any(map(is_of_users, classes(treedef)))


def mask_within(mask: Mask | Array | None, queries: int = LIMIT, keys: int = LIMIT) -> Mask | None:
    """A mask over the positions of the whole, for the first queries and keys."""
    rule = None if mask is None else as_mask(mask)
    return rule if queries == keys == LIMIT else Within(rule, queries, keys)


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
