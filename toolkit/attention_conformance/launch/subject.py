"""What a kernel is: any attention, with what it expects and returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

LAYOUTS = ("BHSD", "BSHD", "SBHD", "HSD", "SHD", "SD")
"""Orders of the axes batch, heads, sequence and width; an axis that a layout lacks is looped over."""


class NotOffered(Exception):  # noqa: N818 (a fact, no error)
    """A kernel does not declare what a case needs."""


STRIDED = ("numpy", "torch")
"""Libraries whose arrays have strides."""


@dataclass(frozen=True, eq=False)
class Subject:
    """An attention, and what it expects. What is None is found by its signature and by small calls.

    Attributes
    ----------
    function : callable
        It takes query, key and value, and keywords.
    name : str
    backend : str
        The library of its arrays: ``numpy``, ``torch``, ``jax`` or ``tensorflow``.
    device : str
        By default the first device.
    layout : str
        ``BHSD``, ``BSHD``, ``SBHD``, ``HSD``, ``SHD`` or ``SD``.
    order : tuple of str
        The order of query, key and value in the call.
    array_names : tuple of str
        Their keywords in this order, where they are not positional.
    mask : str
        ``keep`` (True may be attended to), ``drop`` (True is hidden), ``integer`` (1 may be attended to),
        ``additive`` (0 and -inf) or ``none``.
    mask_name, bias_name, causal_name, scale_name, softcap_name, sinks_name, grouped_name, dropout_name : str
        The keywords, where there are such; empty where not. A bias may share the keyword of the mask.
    window_name : str
        The keyword of a window, as the numbers of keys to the left and to the right of a query's own.
    alibi_name : str
        The keyword of ALiBi's rates in float32, one for each head: the bias is minus the rate times the distance.
    full_mask : bool
        Whether a mask must have the whole shape (B, H, M, N).
    causal : str
        ``top-left``, ``bottom-right``, ``none``, or ``always``: from the top left in every call.
    mask_with_causal : bool
        Whether a mask and causality may be asked for at once.
    default_scale : str
        ``sqrt`` (1 / √D) or ``one``.
    grouped : bool
        Whether fewer key heads than query heads are taken.
    same_width : bool
        Whether values must be as wide as keys.
    dtypes : tuple of str
    keeps_dtype : bool
        Whether the output has the dtype of the query.
    keeps_library : bool
        Whether it is an array of the library of the query, and none of NumPy.
    returns : tuple of str
        What comes unasked, out of ``output``, ``weights`` and ``logsumexp``. Shapes tell which result is which.
    asks : mapping
        The keywords that ask for weights or logsumexp, by that name.
    differentiates : bool
    backward : callable
        The second of a pair of functions without autograd. It is called with ``(d_output, query, key, value, output,
        logsumexp)``, as far as its parameters go, and returns the gradients of the three.
    options : mapping
        Keywords of every call.
    positional : mapping
        Options that have a place after the arrays and no keyword, in their order, with their defaults.
    unknown : tuple of str
        Parameters that nothing is known of; they stay at their defaults.
    batch_invariant : bool
        Whether it promises a sample the same bits in any batch.
    native : bool
        Whether it has the signature of `attention_core.scaled_dot_product_attention`; nothing is translated then.
    """

    function: Callable[..., Any]
    name: str = ""
    backend: str | None = None
    device: str | None = None
    layout: str | None = None
    order: tuple[str, ...] | None = None
    array_names: tuple[str, ...] | None = None
    mask: str | None = None
    mask_name: str | None = None
    bias_name: str | None = None
    causal_name: str | None = None
    scale_name: str | None = None
    softcap_name: str | None = None
    sinks_name: str | None = None
    grouped_name: str | None = None
    dropout_name: str | None = None
    window_name: str | None = None
    alibi_name: str | None = None
    full_mask: bool | None = None
    causal: str | None = None
    mask_with_causal: bool | None = None
    default_scale: str | None = None
    grouped: bool | None = None
    same_width: bool | None = None
    dtypes: tuple[str, ...] | None = None
    keeps_dtype: bool | None = None
    keeps_library: bool | None = None
    returns: tuple[str, ...] | None = None
    asks: Mapping[str, Mapping[str, Any]] | None = None
    differentiates: bool | None = None
    backward: Callable[..., Any] | None = None
    options: Mapping[str, Any] | None = None
    positional: Mapping[str, Any] | None = None
    unknown: tuple[str, ...] | None = None
    batch_invariant: bool | None = None
    native: bool | None = None

    def learned(self, facts: Mapping[str, Any]) -> Subject:
        """A kernel that knows more; what was declared stays."""
        return replace(self, **{name: fact for name, fact in facts.items() if getattr(self, name) is None})

    @property
    def declared(self) -> dict[str, Any]:
        """Everything that is not None, by name."""
        names = [each.name for each in fields(self) if each.name not in ("function", "backward")]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @functools.cached_property
    def known(self) -> dict[Any, Any]:
        """What calls have shown of it in this process, by what was asked."""
        return {}

    def gives(self, name: str) -> bool:
        """Whether a call gives weights or the logsumexp, asked or unasked."""
        return bool(self.native) or name in {*(self.asks or ()), *(self.returns or ())}

    @property
    def mask_is_bias(self) -> bool:
        """Whether mask and bias share one keyword."""
        return bool(self.mask_name) and self.mask_name == self.bias_name
