r"""One call of attention as its implementations receive it, and the steps that all of them share.

Among them is what follows the product, for all scores or for one block,

.. math:: s_{ij} = f\!\left(c \tanh\frac{r_{ij}}{c}\right) + b_{ij}, \qquad r_{ij} = (\sigma q_i) \cdot k_j,

and :math:`s_{ij} = -\infty` where query i may not attend to key j. At the end is what holds for all calls in a block of
code: settings, and who records them.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from .._arrays import (
    HALF,
    Array,
    Namespace,
    at_least_one,
    dtype_name,
    is_counted,
    length,
    number_like,
    positions,
    shape,
    sizes,
    take_rows,
    upcast,
)
from .._backend import Backend, is_concrete
from .._checks import check_flags, check_like_array, result_of
from .._keywords import untraced
from ..masks import Mask, Positions
from ..random import Dropout, kept_at


class Attention(NamedTuple):
    """Result of attention, with what was asked for besides the output; the rest is ``None``."""

    output: Array
    weights: Array | None = None
    logsumexp: Array | None = None


class Result(NamedTuple):
    """`Attention` as ways find it. Logsumexp and remainder, if there is one, make the exact logsumexp together."""

    output: Array
    weights: Array | None = None
    logsumexp: Array | None = None
    remainder: Array | None = None


class Whole(NamedTuple):
    """Where a part of some samples and heads stands in the whole: indices as in `Call.starts`, and the query heads."""

    batch: Any = 0
    head: Any = 0
    num_heads: Any = None  # by default those of the part


class Call(NamedTuple):
    """The arguments of a call, checked. A part of a call is a call (`parts.cut`).

    Attributes
    ----------
    query, key, value : Array, shapes (..., H, M, D), (..., G, N, D) and (..., G, N, E)
    xp : array namespace
    backend : Backend
        Of the library of the arrays.
    bias : Array or None
    softcap, scale : float or Array or None
    score_mod : callable or None
    mask : Mask or Array of bool or None
    sinks : Array or None
        Of shape (H,): for each head the score of a sink, which has no value.
    dropout : Dropout or None
    starts : tuple of int or Array
        Positions of the first query and of the first key; or, where they are no neighbours, of all of them.
    whole : Whole
    arithmetic : {"fast", "reproducible"}
    assume_finite : bool or None
        ``True``: nobody looks at results; ``False``: everybody does; ``None``: a host alone.
    """

    query: Array
    key: Array
    value: Array
    xp: Namespace
    backend: Backend
    bias: Array | None = None  # it is differentiated by blocks, as are softcap and score_mod
    softcap: float | Array | None = None
    score_mod: Callable[..., Array] | None = None
    mask: Mask | Array | None = None
    scale: Any = None  # a number or an array
    sinks: Array | None = None
    dropout: Dropout | None = None
    starts: tuple[Any, Any] = (0, 0)
    whole: Whole = Whole()
    arithmetic: str = "fast"
    assume_finite: bool | None = None


def upcast_call(call: Call) -> Call:
    """The call with 16-bit arrays in the type of the computation, float32."""
    if dtype_name(call.query.dtype) not in HALF:
        return call
    query, key, value, bias = upcast((call.query, call.key, call.value, call.bias), xp=call.xp)
    return call._replace(query=query, key=key, value=value, bias=bias)


def has_no_pairs(call: Call) -> bool:
    """Whether there is no query, or no key."""
    return 0 in (*sizes(call.query)[:-1], *sizes(call.key)[:-1])


def group_size(query: Array, key: Array, xp: Namespace) -> Any:
    """How often a key/value head is repeated: an integer, or a 0-d array where heads are counted only when running."""
    num_heads, num_kv_heads = length(query, -3, xp=xp), length(key, -3, xp=xp)
    return at_least_one(num_heads // at_least_one(num_kv_heads, xp), xp)


def scale_like(query: Array, scale: float | Array | None, xp: Namespace) -> float | Array:
    """The scale in the type of the query, by default one over the root of the head dimension."""
    return default_scale(query, xp) if scale is None else number_like(scale, query, xp)


def default_scale(query: Array, xp: Namespace) -> float | Array:
    """One over the root of the head dimension."""
    width = length(query, -1, xp=xp)
    if not is_counted(width):
        return max(width, 1) ** -0.5  # of no elements, all scores are 0
    inverse = xp.divide(1.0, xp.sqrt(xp.astype(width, xp.float64)))  # as precise as a Python float
    return xp.astype(inverse, query.dtype)


def score_positions(call: Call) -> Positions:
    """Where the scores of a call stand."""
    xp, query = call.xp, call.query
    *leading, heads, rows, _ = shape(query, xp=xp)
    columns = shape(call.key, xp=xp)[-2]
    if len(leading) == 1:  # an axis of open length is not even named
        batch = positions(leading[0], query, xp=xp)
        for _ in range(3):
            batch = xp.expand_dims(batch, axis=-1)
    else:
        batch = xp.reshape(positions(math.prod(leading), query, xp=xp), (*leading, 1, 1, 1) if leading else ())
    return Positions(
        counted_from(call.whole.batch, batch, xp),
        xp.reshape(counted_from(call.whole.head, positions(heads, query, xp=xp), xp), (heads, 1, 1)),
        xp.expand_dims(counted_from(call.starts[0], positions(rows, query, xp=xp), xp), axis=-1),
        counted_from(call.starts[1], positions(columns, call.key, xp=xp), xp),
    )


def num_heads_of_whole(call: Call) -> Any:
    """The number of query heads, by which `apply_dropout` counts samples."""
    return length(call.query, -3, xp=call.xp) if call.whole.num_heads is None else call.whole.num_heads


def is_listed(start: Any) -> bool:
    """Whether this is no first position, but an array of all of them."""
    return not isinstance(start, int) and len(getattr(start, "shape", ())) > 0  # nothing is asked of a symbol


def counted_from(start: Any, counted: Array, xp: Namespace) -> Array:
    """The positions of queries or keys that are counted from 0."""
    if isinstance(start, int):
        return counted if start == 0 else xp.add(counted, start)
    start = xp.astype(start, xp.int32)
    return take_rows(start, counted, axis=0, xp=xp) if is_listed(start) else xp.add(counted, start)


def dropout_scale(dropout: Dropout | None) -> float:
    """What an average over weights is multiplied by to make up for those that were dropped."""
    return 1.0 if dropout is None else dropout.scale


def apply_dropout(
    weights: Array, dropout: Dropout | None, at: Positions | None, num_heads: Any, xp: Namespace
) -> Array:
    """Weights with some of them 0, for which `Dropout.scale` makes up."""
    if dropout is None or dropout.rate == 0 or at is None:
        return weights
    sample = xp.add(xp.multiply(at.batch, num_heads), at.head)
    kept = kept_at(dropout, sample, at.query, at.key, xp=xp)
    return xp.multiply(weights, xp.astype(kept, weights.dtype))  # NaN stays, as in a row that is not finite


def fold_group(x: Array, group: Any, /, *, xp: Namespace) -> Array:
    """The rows of all query heads that share a key/value head, one below the other: (..., H, M, D), (..., G, R M, D).

    So no key or value is repeated, and the vectors of a decoding step become a matrix.
    """
    *leading, heads, rows, width = shape(x, xp=xp)
    return xp.reshape(x, (*leading, heads // group, group * rows, width))


def flatten_group(x: Array, /, *, xp: Namespace) -> Array:
    """The same rows, of heads that have an axis for their group: (..., G, R, M, D) as (..., G, R M, D)."""
    *leading, group, rows, width = shape(x, xp=xp)
    return xp.reshape(x, (*leading, group * rows, width))


def unfold_group(x: Array, group: Any, /, *, xp: Namespace) -> Array:
    """The inverse of `fold_group`: (..., G, R M, D) as (..., H, M, D)."""
    *leading, num_kv_heads, rows, width = shape(x, xp=xp)
    return xp.reshape(x, (*leading, num_kv_heads * group, rows // group, width))


def repeat_kv(x: Array, group: Any, /, *, xp: Namespace) -> Array:
    """Repeat every key/value head for the query heads that share it, in order: 0, 0, 1, 1 and so on."""
    return x if isinstance(group, int) and group == 1 else xp.repeat(x, group, axis=-3)


def modify_scores(
    scores: Array,
    softcap: float | Array | None,
    score_mod: Callable[..., Array] | None,
    at: Positions | None,
    allowed: Array | None = None,
    *,
    xp: Namespace,
) -> Array:
    r"""Scores after the cap, :math:`c \tanh(s / c)`, and after a function of score and positions.

    What is not allowed becomes 0 first: an infinity there would reach their gradients.
    """
    scores = scores if allowed is None else xp.where(allowed, scores, 0.0)
    if softcap is not None:
        softcap = number_like(softcap, scores, xp)
        scores = xp.multiply(xp.tanh(xp.divide(scores, softcap)), softcap)
    if score_mod is None:
        return scores
    new = result_of("score_mod", score_mod, scores, *at)  # type: ignore[misc]
    check_like_array("the result of score_mod", new, "its scores", scores)
    return xp.add(new, 0.0)  # a copy, over which exponentials may be written


def allowed_by(mask: Mask | Array | None, bias: Array | None, at: Positions | None, xp: Namespace) -> Array | None:
    """Where attention is allowed: by the mask, and by a bias that is not -inf; ``None`` for everywhere."""
    if isinstance(mask, Mask):
        assert at is not None
        mask = mask.allowed(at, xp=xp)
    elif mask is not None and not len(mask.shape):
        mask = xp.reshape(mask, (1,))
    if bias is None:
        return mask
    admitted = xp.not_equal(bias if len(bias.shape) else xp.reshape(bias, (1,)), -math.inf)
    return admitted if mask is None else xp.logical_and(mask, admitted)


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
