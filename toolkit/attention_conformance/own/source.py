"""Inputs of the cases that compare bits, drawn by the core's own generator."""

from __future__ import annotations

import zlib
from typing import Any, TypeAlias

import numpy as np

from attention_conformance.problem import NumpyArray, rounded
from attention_core import initializers
from attention_core.backend import get_backend
from attention_core.parameters import FeedForward, LayerNorm, Linear, MultiHeadAttention
from attention_core.random import random_bits

Trees: TypeAlias = dict[str, Any]
"""Arrays, and parameters, by the names of the arguments that they are."""


class Source:
    """Inputs of one case, drawn one after the other: float32, then rounded to the dtype."""

    def __init__(self, name: str, dtype: str) -> None:
        self.dtype = dtype
        self._xp = get_backend("numpy").namespace
        self._name, self._drawn = zlib.crc32(name.encode()), 0

    def array(self, numbers: Any) -> NumpyArray:
        """Round given numbers to the dtype."""
        return rounded(np.asarray(numbers), self.dtype)

    def normal(self, *dims: int, deviation: float = 1.0) -> NumpyArray:
        """Draw from a normal distribution."""
        return self.array(initializers.normal(self._seed(), dims, stddev=deviation, xp=self._xp))

    def integers(self, below: int, *dims: int) -> NumpyArray:
        """Draw integers from 0 to before a number, of dtype int32."""
        words: NumpyArray = random_bits(self._seed(), dims, xp=self._xp)
        return (words.view(np.uint32) % below).astype(np.int32)

    def spread(self, *dims: int, least: int, most: int) -> NumpyArray:
        """Draw numbers of both signs whose exponents go from the least to the most."""
        exponents = least + self.integers(most - least + 1, *dims)
        return self.array(np.ldexp(self.normal(*dims).astype(np.float64), exponents))

    def linear(self, channels: int, out: int) -> Linear:
        """Draw an affine map that keeps the size of what it maps."""
        return Linear(self.normal(channels, out, deviation=channels**-0.5), self.normal(out, deviation=0.1))

    def norm(self, channels: int) -> LayerNorm:
        """Draw a scale around 1, and an offset."""
        return LayerNorm(self.array(1 + self.normal(channels, deviation=0.1)), self.normal(channels, deviation=0.1))

    def feed_forward(self, channels: int, inner: int) -> FeedForward:
        """Draw the two maps of a feed-forward network."""
        return FeedForward(self.linear(channels, inner), self.linear(inner, channels))

    def projections(self, channels: int, groups: int) -> MultiHeadAttention:
        """Draw projections to 4 query heads and so many key/value heads."""
        shared = channels // 4 * groups
        query, key, value = (self.linear(channels, out) for out in (channels, shared, shared))
        output = self.linear(channels, channels)
        return MultiHeadAttention(query, key, value, output)

    def attention(
        self,
        *,
        leading: tuple[int, ...] = (2,),
        heads: int = 4,
        groups: int | None = None,
        rows: int = 6,
        columns: int = 9,
        width: int = 8,
        value_width: int = 8,
    ) -> Trees:
        """Draw queries, keys and values."""
        groups = heads if groups is None else groups
        return {
            "query": self.normal(*leading, heads, rows, width),
            "key": self.normal(*leading, groups, columns, width),
            "value": self.normal(*leading, groups, columns, value_width),
        }

    def _seed(self) -> int:
        self._drawn += 1
        return self._name | self._drawn << 32


class Blank(Source):
    """Inputs of which names and shapes are asked for alone: to draw them takes a second of every start."""

    def normal(self, *dims: int, deviation: float = 1.0) -> NumpyArray:
        """Zeros."""
        return self.array(np.zeros(dims))
