"""Attention, written once against the Python array API standard."""

import typing as _typing

from . import cache, functions, pieces, scores, weights  # noqa: F401 (attributes of the package)
from ._attention.call import Attention
from ._attention.config import config_context
from ._attention.shards.splits import Shards
from ._attention.ways import Explanation
from ._functions.attention import attention_scores, explain_attention, scaled_dot_product_attention
from ._functions.multi_head import merge_heads, multi_head_attention, split_heads
from ._functions.shards import shard, shard_positions, unshard
from ._keywords import publish as _publish
from .masks import Causal, KeyLengths, Mask, MaskFunction, Segments, SlidingWindow
from .random import Dropout

__all__ = [
    "Attention",
    "Causal",
    "Dropout",
    "Explanation",
    "KeyLengths",
    "Mask",
    "MaskFunction",
    "Segments",
    "Shards",
    "SlidingWindow",
    "attention_scores",
    "config_context",
    "explain_attention",
    "merge_heads",
    "multi_head_attention",
    "scaled_dot_product_attention",
    "shard",
    "shard_positions",
    "split_heads",
    "unshard",
]

if _typing.TYPE_CHECKING:  # by that name alone checkers know it
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """The version, which is read when it is first asked for: that takes longer than importing the core."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version  # noqa: PLC0415

        globals()[name] = version("attention-core")
        return globals()[name]


_publish(vars(), __all__)
