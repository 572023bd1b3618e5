"""The weights of chosen queries, keys and heads, and maps of all of them, without M × N numbers at a time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, Unpack

from .._arrays import (
    Array,
    Namespace,
    cast_to,
    dtype_name,
    shape_text,
    sizes,
    type_text,
    upcast,
)
from .._attention.call import Call, upcast_call
from .._attention.config import CONTEXTS
from .._attention.parts import Places, Run, cut, taken
from .._attention.ways import all_scores, run_call
from .._backend import array_of, common_namespace, with_autocast
from .._checks import (
    check_positive,
    check_shapes,
    number_text,
    plain_integer,
)
from .attention import make_call
from .options import Options, options_but

Choice: TypeAlias = slice | Sequence[int] | None
NOT_OF_WEIGHTS = ("dropout", "return_weights", "return_logsumexp", "implementation", "assume_finite", "shards")
SCORES_AT_ONCE = 2**22
"""How many scores of a map are held at a time, as far as one row of them is no more."""


@with_autocast(options=options_but(*NOT_OF_WEIGHTS))
def attention_weights(
    query: Array,
    key: Array,
    /,
    *,
    queries: Choice = None,
    keys: Choice = None,
    heads: Choice = None,
    logsumexp: Array | None = None,
    **options: Unpack[Options],
) -> Array:
    r"""Compute the weights that chosen queries give to chosen keys, in chosen heads.

    .. math:: p_{ij} = \exp(s_{ij} - \ell_i)

    Nothing is computed for other queries, so that a few rows of a long sequence need little memory. With the
    logsumexp of the call, nothing is computed for other keys, either.

    Parameters
    ----------
    query : Array, shape (..., H, M, D)
        All queries, as attention got them.
    key : Array, shape (..., G, N, D)
    queries, keys, heads : slice or sequence of int, optional
        Which, as indices along M, N and H; negative ones count from the end. By default all.
    logsumexp : Array, shape (..., H, M), optional
        :math:`\ell`, that of all queries, from `scaled_dot_product_attention` with ``return_logsumexp=True``. It
        already holds the sinks. Without it, all keys of the chosen queries are looked at.
    mask, bias, is_causal, scale, softcap, score_mod, sinks, arithmetic, xp
        As in `scaled_dot_product_attention`: for all queries, keys and heads.

    Returns
    -------
    Array, shape (..., heads, queries, keys)
        Of the query's dtype. Without the logsumexp, in reproducible arithmetic, they have the bits of the weights that
        attention returns. From it, a weight is as uncertain as its score and :math:`\ell_i`.

    Raises
    ------
    TypeError, ValueError
        As in `scaled_dot_product_attention`; also when an index is out of range, the logsumexp does not fit, or it is
        given with ``arithmetic="reproducible"``.

    See Also
    --------
    attention_map : All weights, at a lower resolution.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> query, key = xp.zeros((1, 1000, 4)), xp.ones((1, 1000, 4))
    >>> attention_weights(query, key, queries=[3], keys=slice(0, 5), is_causal=True)
    Array([[[0.25, 0.25, 0.25, 0.25, 0.  ]]], dtype=array_api_strict.float64)
    """
    call = make_call(query, key, key, **options)
    chosen = _chosen(call, heads, queries, keys)
    if logsumexp is not None:
        _check_logsumexp(logsumexp, call)
    found = _weights(call, *chosen) if logsumexp is None else _weights_from(logsumexp, call, *chosen)
    return cast_to(found, query.dtype, xp=call.xp)


@with_autocast(options=options_but(*NOT_OF_WEIGHTS))
def attention_map(query: Array, key: Array, /, *, shape: tuple[int, int], **options: Unpack[Options]) -> Array:
    r"""Compute a map of all weights at a lower resolution, as a picture of them needs.

    .. math:: P_{ab} = \max_{i \in I_a,\, j \in J_b} p_{ij},

    where :math:`I_a` and :math:`J_b` are runs of :math:`\lceil M / m \rceil` queries and :math:`\lceil N / n \rceil`
    keys. A run at the end may be shorter. Time grows with M × N, and memory does not.

    Parameters
    ----------
    query : Array, shape (..., H, M, D)
    key : Array, shape (..., G, N, D)
    shape : tuple of int
        The largest numbers of rows and columns, m and n. There are as many as runs.
    mask, bias, is_causal, scale, softcap, score_mod, sinks, arithmetic, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Array, shape (..., H, m, n)
        In the compute dtype: float32 for 16-bit types.

    Raises
    ------
    TypeError, ValueError
        As in `scaled_dot_product_attention`; also when lengths are unknown while a program is traced.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> x = xp.zeros((1, 8, 4))
    >>> found = attention_map(x, x, shape=(4, 2), is_causal=True)
    >>> [round(float(found[0, row, 0]), 2) for row in range(4)]
    [1.0, 0.33, 0.2, 0.14]
    """
    call = make_call(query, key, key, **options)
    return _checked_map(call, shape)


class RecordedAttention:
    """A call of attention that `record_attention` has seen: what it got, and its weights as they are asked for.

    Attributes
    ----------
    query : Array, shape (..., H, M, D)
    key : Array, shape (..., G, N, D)
    value : Array, shape (..., G, N, E)
    """

    def __init__(self, call: Call, /) -> None:
        self._call = call
        self.query, self.key, self.value = call.query, call.key, call.value

    def __repr__(self) -> str:
        return f"RecordedAttention(query {shape_text(self.query)}, key {shape_text(self.key)})"

    def weights(self, *, queries: Choice = None, keys: Choice = None, heads: Choice = None) -> Array:
        """Compute weights as `attention_weights` does."""
        found = _weights(self._call, *_chosen(self._call, heads, queries, keys))
        return cast_to(found, self.query.dtype, xp=self._call.xp)

    def map(self, *, shape: tuple[int, int]) -> Array:
        """Compute a map as `attention_map` does."""
        return _checked_map(self._call, shape)

    def output(self) -> Array:
        """Compute the output (..., H, M, E) again."""
        return cast_to(run_call(self._call, "auto").output, self.query.dtype, xp=self._call.xp)


@contextlib.contextmanager
def record_attention() -> Iterator[Sequence[RecordedAttention]]:
    """Record all calls of attention within a ``with`` statement: of functions, layers, and models that contain them.

    Calls compute what they would compute otherwise. A record keeps query, key, value, mask and bias of its call, and
    computes weights when it is asked. Calls of other threads are not recorded.

    Yields
    ------
    Sequence of RecordedAttention
        One for each call, in order.

    Raises
    ------
    ValueError
        When a call is traced or compiled. It is raised by the call.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core import scaled_dot_product_attention
    >>> x = xp.zeros((1, 3, 4))
    >>> with record_attention() as records:
    ...     output = scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> records
    [RecordedAttention(query (1, 3, 4), key (1, 3, 4))]
    >>> records[0].weights(queries=[1])
    Array([[[0.5, 0.5, 0. ]]], dtype=array_api_strict.float64)
    """
    records: list[RecordedAttention] = []

    def note(call: Call) -> None:
        records.append(RecordedAttention(call))

    CONTEXTS.recorders.append(note)
    try:
        yield records
    finally:
        CONTEXTS.recorders.remove(note)


def _checked_map(call: Call, shape: Any) -> Array:
    if not isinstance(shape, tuple | list) or len(shape) != 2:
        raise TypeError(f"expected shape as (rows, columns); got {type_text(shape)}")
    return _map(call, (check_positive("shape", shape[0]), check_positive("shape", shape[1])))


def _map(call: Call, most: tuple[int, int]) -> Array:
    xp = call.xp
    *leading, heads, num_queries, _ = _known(call.query)
    num_keys = _known(call.key)[-2]
    rows, columns = (max(1, -(-length // number)) for length, number in zip((num_queries, num_keys), most, strict=True))
    at_once = max(1, SCORES_AT_ONCE // max(1, math.prod(leading) * heads * num_keys))
    step = at_once // rows * rows or rows  # whole rows of the map, as far as they are no more than is held
    maps = [
        _rows(call, range(first, min(first + step, num_queries)), (rows, columns), at_once)
        for first in range(0, max(1, num_queries), step)
    ]
    return maps[0] if len(maps) == 1 else xp.concat(maps, axis=-2)


def _rows(call: Call, queries: range, block: tuple[int, int], at_once: int) -> Array:
    """Rows of a map from their queries: many rows from weights at once, or one row from weights in parts."""
    xp, found = call.xp, None
    for start in range(queries.start, max(queries.stop, queries.start + 1), at_once):
        part = range(start, min(start + at_once, queries.stop))
        weights = _runs(_weights(call, None, Run(start, len(part)), None), block[1], axis=-1, xp=xp)
        weights = _runs(weights, block[0], axis=-2, xp=xp)
        found = weights if found is None else xp.maximum(found, weights)
    return found


def _runs(x: Array, length: int, *, axis: int, xp: Namespace) -> Array:
    """The largest of each run of so many elements along an axis, -1 or -2; the last run may be shorter."""
    dims, behind = list(_known(x)), [slice(None)] * (-axis - 1)
    size = dims[axis]
    whole = size - size % length
    cut = [*dims[:axis], whole // length, length, *(dims[axis + 1 :] if axis < -1 else [])]
    found = xp.max(xp.reshape(x[(..., slice(0, whole), *behind)], tuple(cut)), axis=axis)
    if whole == size:
        return found
    rest = xp.max(x[(..., slice(whole, size), *behind)], axis=axis, keepdims=True)
    return xp.concat([found, rest], axis=axis) if whole else rest


def _weights(call: Call, heads: Places, queries: Places, keys: Places) -> Array:
    """The weights of chosen queries, from all of their keys, in the compute dtype."""
    part = cut(call._replace(value=call.key[..., :0]), heads=heads, rows=queries)  # of the output, nothing is used
    return taken(run_call(part, "dense", weights=True, logsumexp=False).weights, keys, -1, call.xp)


def _weights_from(logsumexp: Array, call: Call, heads: Places, queries: Places, keys: Places) -> Array:
    """The same from the logsumexp of all queries (..., H, M), by scores of the chosen keys alone."""
    xp = call.xp
    lse = xp.expand_dims(taken(taken(logsumexp, heads, -2, xp), queries, -1, xp), axis=-1)
    scores = all_scores(upcast_call(cut(call, heads=heads, rows=queries, columns=keys)))
    masked = xp.equal(scores, -math.inf)
    return xp.where(masked, 0.0, xp.exp(xp.subtract(scores, xp.where(xp.equal(lse, -math.inf), 0.0, lse))))


def _chosen(call: Call, heads: Choice, queries: Choice, keys: Choice) -> list[Places]:
    """What was chosen of the axes of the scores (..., H, M, N)."""
    lengths = (*sizes(call.query)[-3:-1], sizes(call.key)[-2])
    named = zip(("heads", "queries", "keys"), (heads, queries, keys), lengths, strict=True)
    return [_places(_indices(*each), call) for each in named]


def _places(indices: Sequence[int] | None, call: Call) -> Places:
    if isinstance(indices, range) and indices.step == 1:  # a view, where the library has them
        return Run(indices.start, len(indices))
    return None if indices is None else array_of(list(indices), call.xp.int32, call.query, call.xp)


def _indices(name: str, choice: Choice, length: int | None) -> Sequence[int] | None:
    """The indices that were chosen along an axis, none of them negative; ``None`` for all."""
    if choice is None:
        return None
    if length is None:
        raise ValueError(f"expected a known length to choose {name} from; got an unknown one")
    if isinstance(choice, slice):
        return range(length)[choice]
    listed = choice.tolist() if hasattr(choice, "tolist") else choice
    if not isinstance(listed, list | tuple | range):
        raise TypeError(f"expected {name} as a slice or a sequence of integers; got {type_text(choice)}")
    indices = [plain_integer(index) for index in listed]
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"expected {name} as a slice or a sequence of integers; got one of {type_text(index)}")
        if not -length <= index < length:
            raise ValueError(f"expected {name} in [{-length}, {length}); got {number_text(index)}")
    return [index % length for index in indices]


def _known(array: Array) -> tuple[int, ...]:
    dims = sizes(array)
    if None in dims:
        raise ValueError(f"expected known sizes for a map; got {shape_text(array)}")
    return dims  # type: ignore[return-value]


_LOGSUMEXP = "query: ... H M D, logsumexp: ... H M floating"


def _check_logsumexp(logsumexp: Array, call: Call) -> None:
    """Raise unless this may be the logsumexp of the call."""
    if call.arithmetic == "reproducible":
        raise ValueError(
            "expected no logsumexp with arithmetic='reproducible', as weights from it have other bits; got one"
        )
    common_namespace(call.xp, {"query": call.query, "logsumexp": logsumexp})
    check_shapes(_LOGSUMEXP, {"query": call.query, "logsumexp": logsumexp})
    wide = dtype_name(upcast(call.query, xp=call.xp).dtype)
    if dtype_name(logsumexp.dtype) != wide:
        raise TypeError(f"expected logsumexp of dtype {wide}; got {dtype_name(logsumexp.dtype)}")
