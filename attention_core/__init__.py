"""Attention, written once against the Python array API standard."""

import importlib as _importlib
import typing as _typing

from . import cache, pieces, scores, weights  # noqa: F401 (attributes of the package)
from ._attention.call import Attention, config_context
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
    from . import functions as functions

    __version__: str
else:

    def __getattr__(name: str) -> _typing.Any:
        """The functions of layers, and the version, which are read when they are first asked for.

        Calls of attention need neither, and reading the version takes longer than importing the core.
        """
        if name == "functions":
            return _importlib.import_module(f"{__name__}.{name}")
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version  # noqa: PLC0415

        return version("attention-core")


_publish(vars(), __all__)
