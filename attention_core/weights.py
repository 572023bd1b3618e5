"""The weights of attention, computed for chosen queries, keys and heads, and recorded in whole models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias, Unpack

from ._arrays import Array, cast_to, shape_text, sizes, type_text
from ._attention.call import CONTEXTS, Call
from ._attention.parts import Places, Run, cut, taken
from ._attention.ways import run_call
from ._backend import array_of, with_autocast
from ._checks import number_text, plain_integer
from ._functions.attention import make_call
from ._functions.options import Options, options_but
from ._keywords import publish

__all__ = ["RecordedAttention", "attention_weights", "record_attention"]

Choice: TypeAlias = slice | Sequence[int] | None
NOT_OF_WEIGHTS = ("dropout", "return_weights", "return_logsumexp", "implementation", "assume_finite", "shards")


@with_autocast(options=options_but(*NOT_OF_WEIGHTS))
def attention_weights(
    query: Array,
    key: Array,
    /,
    *,
    queries: Choice = None,
    keys: Choice = None,
    heads: Choice = None,
    **options: Unpack[Options],
) -> Array:
    """Compute the weights that chosen queries give to chosen keys, in chosen heads.

    Nothing is computed for other queries and heads, so that a few rows of a long sequence need little memory.

    Parameters
    ----------
    query : Array, shape (..., H, M, D)
        All queries, as attention got them.
    key : Array, shape (..., G, N, D)
    queries, keys, heads : slice or sequence of int, optional
        Which, as indices along M, N and H; negative ones count from the end. By default all.
    mask, bias, is_causal, scale, softcap, score_mod, sinks, arithmetic, xp
        As in `scaled_dot_product_attention`: for all queries, keys and heads.

    Returns
    -------
    Array, shape (..., heads, queries, keys)
        Of the query's dtype. In reproducible arithmetic, they have the bits of the weights that attention returns.

    Raises
    ------
    TypeError, ValueError
        As in `scaled_dot_product_attention`; also when an index is out of range.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> query, key = xp.zeros((1, 1000, 4)), xp.ones((1, 1000, 4))
    >>> attention_weights(query, key, queries=[3], keys=slice(0, 5), is_causal=True)
    Array([[[0.25, 0.25, 0.25, 0.25, 0.  ]]], dtype=array_api_strict.float64)
    """
    return RecordedAttention(make_call(query, key, key, **options)).weights(queries=queries, keys=keys, heads=heads)


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
        call = self._call._replace(value=self.key[..., :0])  # of the output, nothing is used
        of_heads, of_rows, columns = _chosen(call, heads, queries, keys)
        part = cut(call, heads=of_heads, rows=of_rows)
        weights = run_call(part, "dense", weights=True, logsumexp=False).weights
        return cast_to(taken(weights, columns, -1, call.xp), self.query.dtype, xp=call.xp)

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


publish(vars(), __all__)
