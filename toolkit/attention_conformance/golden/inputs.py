"""Inputs of the cases of `identical`, drawn by the core's own generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attention_conformance.own.source import Source, Trees
from attention_core.parameters import DecoderLayer, Embeddings, EncoderLayer, GatedFeedForward, Linear, SaganAttention
from attention_models.parameters import Decoder

EXTREMES = (0.0, -0.0, np.inf, -np.inf, np.nan)


def holding(**arrays: Callable[[Source], Any]) -> Callable[[Source], Trees]:
    """Inputs by name, drawn one after the other."""
    return lambda source: {name: make(source) for name, make in arrays.items()}


def besides(**arrays: Callable[[Source], Any]) -> Callable[[Source], Trees]:
    """Query, key and value, and then others, or others in their place."""
    return lambda source: source.attention() | holding(**arrays)(source)


def shaped(**sizes: Any) -> Callable[[Source], Trees]:
    """Query, key and value of other sizes."""
    return lambda source: source.attention(**sizes)


def shared(deviation: float = 1.0, **sizes: Any) -> Callable[[Source], Trees]:
    """Of 24 heads, which 2, 3, 4 and 8 ranks share out evenly; scores deviate by a number."""

    def inputs(source: Source) -> Trees:
        sizes_of_all: dict[str, Any] = {"leading": (1,), "heads": 24, "rows": 13, "columns": 13, "width": 4} | sizes
        trees = source.attention(**sizes_of_all, value_width=4)
        return {**trees, "query": source.array(deviation * trees["query"])}

    return inputs


def zero_channels(source: Source) -> Trees:
    """A channel of zeros, and one that is 0 in an early part of the sequence, or in a late one."""
    trees = shared()(source)
    for name, part in (("query", slice(7)), ("key", slice(7, None)), ("value", slice(7))):
        trees[name][..., 1], trees[name][..., part, 2] = 0.0, 0.0
    return trees


def with_segments(source: Source) -> Trees:
    """Segments of queries and keys besides."""
    ids = {"query_ids": np.sort(source.integers(3, 2, 6), -1), "key_ids": np.sort(source.integers(3, 2, 9), -1)}
    return {**source.attention(), **ids}


def shut(source: Source) -> Trees:
    """A bias of -inf in a third of the places, and in all those of one query."""
    trees = biased(source)
    shut = source.integers(3, 4, 6, 9) == 0
    shut[:, 2] = True
    return {**trees, "bias": np.where(shut, np.float32(-np.inf), trees["bias"])}


def near_ties(source: Source) -> Trees:
    """Scores that are nearly the same."""
    trees = source.attention()
    key = 60 * trees["key"][..., :1, :] * (1 + 2.0**-12 * trees["key"])
    return {**trees, "query": source.array(60 * np.sign(trees["query"])), "key": source.array(key)}


def spread(least: int, most: int) -> Callable[[Source], Trees]:
    """Of queries, keys and values alike, with keys and queries of opposite exponents."""

    def inputs(source: Source) -> Trees:
        trees = source.attention()
        value = source.spread(*trees["value"].shape, least=least, most=most)
        key = source.spread(*trees["key"].shape, least=least // 2, most=most // 2)
        query = source.spread(*trees["query"].shape, least=least // 2, most=most // 2)
        return {"query": query, "key": key, "value": value}

    return inputs


def constant(number: float) -> Callable[[Source], Trees]:
    """One number everywhere."""
    return lambda source: {name: np.full_like(tree, number) for name, tree in source.attention().items()}


def unlike_numbers(*names: str) -> Callable[[Source], Trees]:
    """Infinities, nan and zeros among what the keys 5 and above hold, which `CAUSAL` masks for early queries."""

    def inputs(source: Source) -> Trees:
        trees = source.attention()
        for name in names:
            trees[name][..., 5:, :] = np.resize(np.asarray(EXTREMES, np.float32), trees[name][..., 5:, :].shape)
        return trees

    return inputs


def pair(source: Source) -> Trees:
    """Query and key."""
    return {name: tree for name, tree in source.attention().items() if name != "value"}


def scaled_spread(source: Source) -> Trees:
    """Rows whose squares float32 does not hold, and some with what is not finite."""
    x = source.spread(6, 24, least=-140, most=120)
    x[5, 3:8] = np.resize(np.asarray(EXTREMES, np.float32), 5)
    return {"scale": source.normal(24), "x": source.array(x)}


def placed(source: Source) -> Trees:
    """Positions near and far, of both signs, for every sample of a batch."""
    near, far = source.integers(100, 1, 6), source.integers(2**31 - 1, 1, 6)
    return {"x": source.normal(2, 3, 6, 16), "positions": np.concatenate([near, np.where(far % 2, far, -far)])}


def placed_spread(source: Source) -> Trees:
    """The same with numbers of unlike magnitude, and some that are not finite."""
    trees = placed(source)
    x = source.spread(2, 3, 6, 16, least=-140, most=120)
    x[1, 2, 5, :5] = EXTREMES
    return {**trees, "x": source.array(x)}


def multi_head(source: Source) -> Trees:
    """Projections and their input."""
    return {"parameters": source.projections(16, 4), "x": source.normal(2, 6, 16)}


def encoder(source: Source) -> Trees:
    """An encoder layer and its input."""
    maps, norms = source.projections(16, 4), (source.norm(16), source.norm(16))
    parameters = EncoderLayer(maps, norms[0], source.feed_forward(16, 48), norms[1])
    return {"parameters": parameters, "x": source.normal(2, 6, 16)}


def language(source: Source) -> Trees:
    """Two layers of a decoder, with grouped heads, one with normalized queries and keys; prompts of two lengths."""
    layers = tuple(
        DecoderLayer(
            attention_norm=source.normal(16),
            attention=source.projections(16, 2),
            feed_forward_norm=source.normal(16),
            feed_forward=GatedFeedForward(source.linear(16, 24), source.linear(16, 24), source.linear(24, 16)),
            query_norm=norm,
            key_norm=norm,
        )
        for norm in (None, source.normal(4))
    )
    parameters = Decoder(source.normal(30, 16), layers, source.normal(16))
    return {"parameters": parameters, "ids": source.integers(30, 3, 7), "lengths": np.asarray([4, 1, 3], np.int32)}


ordinary = besides()
masked = besides(mask=lambda s: s.integers(3, 2, 1, 6, 9) > 0)
with_lengths = besides(lengths=lambda s: np.asarray([0, 5], np.int32))
biased = besides(bias=lambda s: s.normal(4, 6, 9, deviation=3.0))
subnormal = besides(value=lambda s: s.spread(2, 4, 9, 8, least=-149, most=-127))
affine = holding(parameters=lambda s: s.linear(24, 10), x=lambda s: s.normal(2, 5, 24))
affine_spread = holding(  # ranges that products of float32 just hold, subnormal results among them
    parameters=lambda s: Linear(s.spread(24, 10, least=-60, most=60), None),
    x=lambda s: s.spread(5, 24, least=-60, most=60),
)
normalized = holding(parameters=lambda s: s.norm(24), x=lambda s: s.array(3 + 2 * s.normal(2, 5, 24)))
scaled = holding(scale=lambda s: s.array(1 + s.normal(24, deviation=0.1)), x=lambda s: s.normal(2, 5, 24))
line = holding(x=lambda s: s.array(np.linspace(-40, 40, 2001)))
line_of_extremes = holding(
    x=lambda s: s.array([*EXTREMES, *np.ldexp([1.0, -1.0, 3.0], -149), *np.ldexp([1.0, -1.0], 120)])
)
feed_forward = holding(parameters=lambda s: s.feed_forward(16, 48), x=lambda s: s.normal(2, 5, 16))
gated_feed_forward = holding(
    parameters=lambda s: GatedFeedForward(s.linear(16, 48), s.linear(16, 48), s.linear(48, 16)),
    x=lambda s: s.normal(2, 5, 16),
)
tokens = holding(
    parameters=lambda s: Embeddings(s.normal(30, 16), s.normal(12, 16), s.normal(2, 16), s.norm(16)),
    ids=lambda s: s.integers(30, 3, 9),
    segments=lambda s: s.integers(2, 3, 9),
)
image = holding(
    parameters=lambda s: SaganAttention(
        s.linear(8, 2), s.linear(8, 2), s.linear(8, 4), s.linear(4, 8), sigma=s.array(np.asarray(0.7))
    ),
    x=lambda s: s.normal(2, 6, 4, 8),
)
matrix = holding(weight=lambda s: s.normal(3, 3, 4, 10), u=lambda s: s.normal(10))
