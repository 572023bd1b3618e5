"""Attention to pieces of the keys, each on its own, and the results merged.

What does not fit raises `TypeError` or `ValueError`, as in `scaled_dot_product_attention`.
"""

from ._functions.pieces import Partial, merge_partials, partial_attention
from ._keywords import publish

__all__ = ["Partial", "merge_partials", "partial_attention"]

publish(vars(), __all__)
