"""Peers of Flax."""

from __future__ import annotations

import functools

from flax import nnx

from attention_benchmark.frameworks import with_mask

attention = functools.partial(with_mask, function=nnx.dot_product_attention)
