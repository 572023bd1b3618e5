"""Masks: which query may attend to which key. True = may attend, everywhere.

A mask is a boolean array, or one of the structured masks here, combined with ``&``, ``|`` and ``~``. A structured mask
is a rule about positions, and needs no more memory than its own arrays. From the positions at the ends of a block it
tells whether the block is masked entirely, not at all, or in part.
"""

from .._arrays import Leaf, flatten, unflatten
from .._backend import register
from .._keywords import publish
from ._band import Band
from ._mask import (
    And,
    Given,
    Mask,
    Not,
    Or,
    Positions,
    Spans,
    mask_from_additive,
    mask_from_ignore,
    mask_from_integers,
    mask_from_padding,
)
from ._rules import (
    Banded,
    Causal,
    KeyLengths,
    MaskFunction,
    Segments,
    SlidingWindow,
    is_top_left_causal,
)

__all__ = [
    "And",
    "Band",
    "Banded",
    "Causal",
    "Given",
    "KeyLengths",
    "Leaf",
    "Mask",
    "MaskFunction",
    "Not",
    "Or",
    "Positions",
    "Segments",
    "SlidingWindow",
    "Spans",
    "flatten",
    "is_top_left_causal",
    "mask_from_additive",
    "mask_from_ignore",
    "mask_from_integers",
    "mask_from_padding",
    "unflatten",
]

# Others are made by operators.
_OF_USERS = ("Causal", "KeyLengths", "Mask", "MaskFunction", "Segments", "SlidingWindow")
publish(vars(), [_name for _name in __all__ if _name in _OF_USERS or _name.startswith("mask_from")])
for _name in __all__:
    _thing = vars()[_name]
    _thing.__module__ = __name__  # by which pickles and documentation know it
    if isinstance(_thing, type) and issubclass(_thing, Mask | Leaf):
        register(_name, _thing)
