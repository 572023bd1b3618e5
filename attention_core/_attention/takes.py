"""What a kernel takes of a call, as a table, and the refusal of what it does not take."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._arrays import FLOATING, dtype_name, sizes
from ..masks import Given, Mask
from ..masks._band import CAUSAL, FREE
from ..masks._mask import bounds_of
from .call import Call


class Takes(NamedTuple):
    """What a kernel takes of a call: a table, from whose fields the core writes why it refuses another.

    Attributes
    ----------
    dtypes : tuple of str
        Of query, key and value.
    options : tuple of str
        Out of ``bias``, ``softcap``, ``score_mod`` and ``dropout``.
    masks : tuple of str
        Out of ``causal``, ``window`` (causal, with an end on the left), ``lengths`` and ``array``; or ``any``. A mask
        may be causal, or a window, and have lengths.
    one_width : bool
        Whether values have to be as wide as keys.
    constant_bias : bool
        Whether a bias has to be of the dtype of the query, and is not differentiated.
    """

    dtypes: tuple[str, ...] = FLOATING
    options: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    one_width: bool = False
    constant_bias: bool = False

    def refusal(self, call: Call) -> str | None:
        """Why a kernel does not take a call, as a clause behind its name; ``None`` if it may."""
        if dtype_name(call.query.dtype) not in self.dtypes:
            return f"computes in {' or '.join(self.dtypes)} alone (line 8)"
        for name in ("softcap", "score_mod", "bias", "dropout"):
            option = getattr(call, name)
            is_used = option is not None and (name != "dropout" or option.rate)
            if is_used and name not in self.options:
                return "drops no weights by seed and position (line 11)" if name == "dropout" else f"has no {name}"
        if self.one_width and sizes(call.key)[-1] != sizes(call.value)[-1]:
            return "takes values as wide as keys alone"
        has_gradient: Any = call.backend.has_gradient or (lambda array: False)  # as far as is known
        is_constant = call.bias is None or (call.bias.dtype == call.query.dtype and not has_gradient(call.bias))
        if self.constant_bias and not is_constant:
            return "takes no bias of another dtype than query, nor one that is to be differentiated"
        missing = [] if "any" in self.masks else [kind for kind in kinds_of(call.mask) if kind not in self.masks]
        return f"takes no mask of the kind {' or '.join(missing)} (line 2)" if missing else None


def kinds_of(mask: Any) -> list[str]:
    """The kinds of a mask, as `Takes` names them."""
    if mask is None:
        return []
    if not isinstance(mask, Mask) or isinstance(mask, Given):
        return ["array"]
    band = bounds_of(mask)
    if not band.is_plain or not (band.ends == FREE or band.high == 0):
        return ["rule"]
    ends = [] if band.ends == FREE else ["causal" if band.ends == CAUSAL else "window"]
    return ends + ["lengths"] * band.has_stop
