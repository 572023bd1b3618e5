"""Attention to pieces of the keys, each on its own, and the results merged.

What does not fit raises `TypeError` or `ValueError`, as in `scaled_dot_product_attention`.
"""

from attention_core._attention.reproducible.pieces import ExactPartial, Extent
from attention_core._functions.pieces import (
    Partial,
    attention_extent,
    complete_partial,
    merge_extents,
    merge_partials,
    partial_attention,
)
from attention_core._keywords import publish

__all__ = [
    "ExactPartial",
    "Extent",
    "Partial",
    "attention_extent",
    "complete_partial",
    "merge_extents",
    "merge_partials",
    "partial_attention",
]

publish(vars(), __all__)
