"""Inputs of the cases of `identical`, drawn by the core's own generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attention_conformance.cases.source import Source, Trees
from attention_core.parameters import (
    Decoder,
    DecoderLayer,
    Embeddings,
    EncoderLayer,
    GatedFeedForward,
    Linear,
    SaganAttention,
)

EXTREMES = (0.0, -0.0, np.inf, -np.inf, np.nan)


def ordinary(source: Source) -> Trees:
    """Query, key and value."""
    return source.attention()


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


def masked(source: Source) -> Trees:
    """A mask besides."""
    return {**source.attention(), "mask": source.integers(3, 2, 1, 6, 9) > 0}


def with_lengths(source: Source) -> Trees:
    """Key lengths besides, one of them 0."""
    return {**source.attention(), "lengths": np.asarray([0, 5], np.int32)}


def with_segments(source: Source) -> Trees:
    """Segments of queries and keys besides."""
    ids = {"query_ids": np.sort(source.integers(3, 2, 6), -1), "key_ids": np.sort(source.integers(3, 2, 9), -1)}
    return {**source.attention(), **ids}


def biased(source: Source) -> Trees:
    """A bias besides."""
    return {**source.attention(), "bias": source.normal(4, 6, 9, deviation=3.0)}


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


def subnormal(source: Source) -> Trees:
    """Subnormal numbers."""
    trees = source.attention()
    return {**trees, "value": source.spread(*trees["value"].shape, least=-149, most=-127)}


def constant(number: float) -> Callable[[Source], Trees]:
    """One number everywhere."""

    def inputs(source: Source) -> Trees:
        return {name: np.full_like(tree, number) for name, tree in source.attention().items()}

    return inputs


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


def affine(source: Source) -> Trees:
    """An affine map and its input."""
    return {"parameters": source.linear(24, 10), "x": source.normal(2, 5, 24)}


def affine_spread(source: Source) -> Trees:
    """Ranges that products of float32 just hold, subnormal results among them."""
    weight, x = source.spread(24, 10, least=-60, most=60), source.spread(5, 24, least=-60, most=60)
    return {"parameters": Linear(weight, None), "x": x}


def normalized(source: Source) -> Trees:
    """A normalization and its input."""
    return {"parameters": source.norm(24), "x": source.array(3 + 2 * source.normal(2, 5, 24))}


def scaled(source: Source) -> Trees:
    """Scales and an input."""
    return {"scale": source.array(1 + source.normal(24, deviation=0.1)), "x": source.normal(2, 5, 24)}


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


def line(source: Source) -> Trees:
    """Numbers from -40 to 40."""
    return {"x": source.array(np.linspace(-40, 40, 2001))}


def line_of_extremes(source: Source) -> Trees:
    """Subnormals, infinities, NaN and large numbers."""
    tiny = np.ldexp(np.asarray([1.0, -1.0, 3.0]), -149)
    return {"x": source.array(np.concatenate([EXTREMES, tiny, np.ldexp([1.0, -1.0], 120)]))}


def feed_forward(source: Source) -> Trees:
    """Two maps and their input."""
    return {"parameters": source.feed_forward(16, 48), "x": source.normal(2, 5, 16)}


def gated_feed_forward(source: Source) -> Trees:
    """Three maps and their input."""
    maps = source.linear(16, 48), source.linear(16, 48), source.linear(48, 16)
    return {"parameters": GatedFeedForward(*maps), "x": source.normal(2, 5, 16)}


def multi_head(groups: int, *, extra: bool) -> Callable[[Source], Trees]:
    """Projections and their input."""
    return lambda source: {
        "parameters": source.projections(16, groups, extra=extra),
        "x": source.normal(2, 6, 16),
    }


def encoder(source: Source) -> Trees:
    """An encoder layer and its input."""
    maps, norms = source.projections(16, 4), (source.norm(16), source.norm(16))
    parameters = EncoderLayer(maps, norms[0], source.feed_forward(16, 48), norms[1])
    return {"parameters": parameters, "x": source.normal(2, 6, 16)}


def tokens(source: Source) -> Trees:
    """Tables of an embedding, and ids."""
    tables = Embeddings(source.normal(30, 16), source.normal(12, 16), source.normal(2, 16), source.norm(16))
    return {"parameters": tables, "ids": source.integers(30, 3, 9), "segments": source.integers(2, 3, 9)}


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


def image(source: Source) -> Trees:
    """An image, and attention over its places."""
    theta, phi, g, output = (source.linear(*sizes) for sizes in ((8, 2), (8, 2), (8, 4), (4, 8)))
    parameters = SaganAttention(theta, phi, g, output, sigma=source.array(np.asarray(0.7)))
    return {"parameters": parameters, "x": source.normal(2, 6, 4, 8)}


def matrix(source: Source) -> Trees:
    """A kernel, and a vector to begin with."""
    return {"weight": source.normal(3, 3, 4, 10), "u": source.normal(10)}
