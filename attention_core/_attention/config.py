"""What holds for all calls of attention in a block of code: settings, and who records them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from .._backend import is_concrete
from .._checks import check_flags
from .._keywords import untraced
from .call import Call


class Contexts(threading.local):
    """All contexts that this thread is in, as lists: a compiler that guards them traces again within others."""

    def __init__(self) -> None:
        self.settings: list[bool | None] = []
        self.recorders: list[Callable[[Call], None]] = []


CONTEXTS = Contexts()
_ASSUMED_FINITE: ContextVar[bool | None] = ContextVar("attention_core.assume_finite", default=None)


@untraced
def assumes_finite(*_: bool | None) -> bool | None:
    """Whether all values are assumed to be finite here, if anybody said so, within the settings of the thread."""
    return _ASSUMED_FINITE.get()


def record(call: Call) -> None:
    """Give a call to all that record; raise if it is traced, as its arrays have no values, and will be gone."""
    if not all(map(is_concrete, (call.query, call.key))):
        raise ValueError("expected eager calls while attention is recorded; got one that is traced or compiled")
    for give in CONTEXTS.recorders:
        give(call)


def config_context(*, assume_finite: bool | None = None) -> contextlib.AbstractContextManager[None]:
    """Set options of all calls of attention in a ``with`` block, of layers among them, as in scikit-learn.

    Parameters
    ----------
    assume_finite : bool, optional
        Whether all queries, keys, values, gradients and their products are assumed to be finite. If so, no value is
        looked at, and attention is faster. A masked NaN or infinity may then leak, and so may a masked score that
        overflows. An attended one may be lost. By default a host looks at results; an accelerator does not, and clears
        keys and values that a rule of the mask hides from all queries. With ``False``, everybody looks, and the host
        waits for the accelerator. What a call is given itself goes before any context.

    Returns
    -------
    context manager
        Of the thread, or of the asynchronous task, that enters it. An inner context replaces an outer one.

    Raises
    ------
    TypeError
        When ``assume_finite`` is neither a boolean nor ``None``.

    Notes
    -----
    A call reads the setting once, when it starts. An exported program keeps what held when it was traced, and so do
    caches of `jax.jit` and `tf.function`. `torch.compile` traces again in a thread with other contexts. Activations
    that are computed again for a gradient, as by `torch.utils.checkpoint`, read it again: pass the option there.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core import explain_attention
    >>> x = xp.ones((1, 2, 4))
    >>> with config_context(assume_finite=True):
    ...     print(explain_attention(x, x, x, is_causal=True).notes[0])
    assume_finite: no value is looked at, and a masked NaN may leak
    """
    if assume_finite is not None:
        check_flags(assume_finite=assume_finite)
        assume_finite = bool(assume_finite)
    return _context(assume_finite)


@contextlib.contextmanager
def _context(assume_finite: bool | None) -> Iterator[None]:
    token, settings = _ASSUMED_FINITE.set(assume_finite), CONTEXTS.settings
    settings.append(assume_finite)
    try:
        yield
    finally:
        settings.pop()
        _ASSUMED_FINITE.reset(token)
