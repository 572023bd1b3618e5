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

publish(vars(), __all__)
for _name in __all__:
    if isinstance(vars()[_name], type) and issubclass(vars()[_name], Mask | Leaf):
        register(_name, vars()[_name])
