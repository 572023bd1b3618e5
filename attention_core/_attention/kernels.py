"""Ways to compute a call, and kernels of a library among them: what a kernel takes is a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .._arrays import FLOATING, Array, dtype_name, sizes
from ..masks import Given, Mask
from ..masks._band import CAUSAL, FREE
from ..masks._mask import bounds_of
from .call import Call, Result


class Verdict(NamedTuple):
    """The judgement of a kernel on one call.

    Attributes
    ----------
    refusal : str or None
        Why the kernel would not give the defined answer, or ``None`` where it does.
    slower : str or None
        Why it is not faster than the core's own implementations, in words that follow its name: then it is taken only
        by name. ``None`` where it is.
    """

    refusal: str | None
    slower: str | None = None


OPEN = Verdict(None)


class Way:
    """A way to compute attention: a base class.

    Attributes
    ----------
    kind : str
        What ``implementation=``, or ``strategy=`` of shards, and explanations call it: ``"dense"``, ``"blockwise"``,
        ``"fused"``.
    reason : str
        Why it is taken, as explanations say.
    """

    kind: str
    reason: str

    def judge(self, call: Any, /) -> Verdict:
        """Say whether the way gives the answer, which it does by default, and why another one is faster."""
        return OPEN

    def has_logsumexp(self, call: Any, /) -> bool:
        """Whether the logsumexp comes with the output."""
        return True

    def run(self, call: Any, /, *, logsumexp: bool, weights: bool = False) -> Result:
        """Compute attention, with what is asked for besides the output if it costs less than by itself."""
        raise NotImplementedError

    def lasting(self, call: Any, /) -> Callable[..., Result] | None:
        """Return `run` for all calls of this signature, which keeps no array; ``None`` if each call finds its own."""
        return None


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
            return "takes values as wide as keys only"
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


class Kernel(Way):
    """A fused kernel of a library, and the calls for which it gives the defined answer: a base class.

    Attributes
    ----------
    name : str
        The name by which users know it.
    takes : Takes
        What it takes of a call.
    """

    name: str
    kind, reason = "fused", "a kernel of the library gives the answer of the definition"
    takes: Takes

    def refusal(self, call: Any, /) -> str | None:
        """Why the kernel does not give the answer to a `Call` that it takes; ``None`` if it does."""
        return None

    def judge(self, call: Any, /) -> Verdict:
        """Say whether the kernel gives the answer to a `Call`, and whether it is faster: by default where it takes it.

        This is called once for a call, or once for a signature if the verdict lasts. It may read query, key and value
        where it does not last. It must not compute attention.
        """
        return Verdict(self.takes.refusal(call) or self.refusal(call))

    def attend(self, call: Any, /) -> Array:
        """Return the output of attention, in the query's dtype."""
        raise NotImplementedError

    def has_logsumexp(self, call: Any, /) -> bool:
        """Whether the kernel returns the logsumexp of a call that it accepts. This may read query, key and value.

        It does not by default. The core computes other calls with sinks.
        """
        return False

    def attend_with_logsumexp(self, call: Any, /) -> tuple[Array, Array]:
        """Return the output of `attend`, bit for bit, and logsumexp (..., H, M).

        Both are differentiable where the library differentiates.
        """
        raise NotImplementedError

    def takes_pieces(self, call: Any, /) -> bool:
        """Whether the kernel has the next two methods for a call that it accepts. It has not by default."""
        return False

    def attend_to_piece(self, call: Any, /) -> tuple[Array, Array] | None:
        """Return output and logsumexp of a piece of the keys, to be merged with those of others.

        Its query is scaled already. ``None`` leaves it to blocks: of a large logsumexp, rounding takes too much.
        """
        raise NotImplementedError

    def piece_gradients(
        self, call: Any, results: tuple[Array, Array], cotangents: tuple[Array, Array], /
    ) -> tuple[Array, Array, Array] | None:
        """Return gradients of query, and of this piece of keys and values, or ``None``.

        Output and logsumexp are those of all keys, and given as exact, and so are their gradients.
        """
        raise NotImplementedError

    def lasts(self, call: Any, /) -> bool:
        """Whether a verdict on this call is one on all of its types, lengths and options, which the core remembers.

        The first kernel of a backend is asked again in every call, as a mode of the library may forbid it. No verdict
        lasts by default.
        """
        return False

    def prepare(self, call: Any, /) -> Kernel:
        """Return a kernel for calls such as this one, which need not find out again what they share.

        It keeps no array of the call. By default, it is this kernel.
        """
        return self

    def run(self, call: Call, /, *, logsumexp: bool, weights: bool = False) -> Result:
        """Return the output, and the logsumexp if it is asked for and comes with it."""
        if not (logsumexp and self.has_logsumexp(call)):
            return Result(self.attend(call))
        output, found = self.attend_with_logsumexp(call)
        return Result(output, None, found)

    def lasting(self, call: Call, /) -> Callable[..., Result] | None:
        """Return `run` for all calls of this signature, if the verdict lasts."""
        return self.prepare(call).run if self.lasts(call) else None
