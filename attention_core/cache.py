"""Caches of keys and values, for decoding."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._arrays import (
    Array,
    DType,
    Namespace,
    clipped,
    index_dtype,
    is_counted,
    on_device_of,
    positions,
    shape,
    shapes_differ,
    sizes,
)
from ._backend import as_constant, backend_for, common_namespace, is_concrete, own_namespace, without_warnings
from ._checks import (
    MAX_POSITIONS,
    OPEN_AXES,
    check_dtype,
    check_flags,
    check_parameters,
    check_placement,
    check_positive,
    check_rank,
    check_shapes,
    check_sizes,
    check_within,
    once_per_signature,
    only_array,
    plain_integer,
    value_range,
)
from ._keywords import publish
from .masks import And, Causal, KeyLengths, Mask

__all__ = ["KeyValueCache", "append", "cache_mask", "empty_cache"]


class KeyValueCache(NamedTuple):
    """Keys and values of the positions so far, in arrays of a fixed capacity C.

    It is a pytree of three arrays whose shapes and dtypes never change, so that frameworks carry it through their
    loops.

    Attributes
    ----------
    key : Array, shape (..., G, C, D)
    value : Array, shape (..., G, C, E)
    length : Array of int32, shape () or (...)
        The number of filled positions: one for all, or one for each sequence of the batch.
    """

    key: Array
    value: Array
    length: Array


def empty_cache(
    leading: tuple[Any, ...],
    num_heads: int,
    capacity: int,
    head_dim: int,
    /,
    *,
    value_dim: int | None = None,
    ragged: bool = False,
    dtype: DType | str | None = None,
    device: Any = None,
    xp: Namespace,
) -> KeyValueCache:
    """Make an empty cache.

    Parameters
    ----------
    leading : tuple of int
        The sizes of the batch axes, before the heads.
    num_heads, capacity, head_dim : int
        G, the number of key/value heads; C, the number of positions; D.
    value_dim : int, optional
        E; by default D.
    ragged : bool
        Whether each sequence of the batch has its own length.
    dtype : dtype or str, optional
        By its name, too, such as ``"bfloat16"``; by default float32.
    device : optional
        By default that of the library.
    xp : array namespace

    Raises
    ------
    TypeError, ValueError
        When a size is not a positive integer, the dtype not of floating point, or the device not one of the library.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> empty_cache((2,), 4, 16, 8, ragged=True, xp=xp).length
    Array([0, 0], dtype=array_api_strict.int32)
    """
    value_dim = head_dim if value_dim is None else value_dim
    check_flags(ragged=ragged)
    leading = check_sizes("leading", leading)
    num_heads = check_positive("num_heads", num_heads)
    capacity = check_positive("capacity", capacity, most=MAX_POSITIONS)
    head_dim = check_positive("head_dim", head_dim)
    value_dim = check_positive("value_dim", value_dim)
    xp = own_namespace(xp)
    dtype = check_dtype("float32" if dtype is None else dtype, xp)
    on_device = check_placement(dtype, device, xp)
    key, value = (
        xp.zeros((*leading, num_heads, capacity, width), dtype=dtype, **on_device) for width in (head_dim, value_dim)
    )
    return KeyValueCache(key, value, xp.zeros(leading if ragged else (), dtype=xp.int32, **on_device))


def append(
    cache: KeyValueCache,
    key: Array,
    value: Array,
    /,
    *,
    num_new: Array | None = None,
    donate: bool = False,
    xp: Namespace | None = None,
) -> KeyValueCache:
    """Write L new positions after the filled ones: at length, …, length + L - 1 of each sequence.

    Parameters
    ----------
    cache : KeyValueCache
        It is not changed, unless it is donated.
    key : Array, shape (..., G, L, D)
        Of the dtype of the cache.
    value : Array, shape (..., G, L, E)
    num_new : Array of int, shape (...), optional
        How many of the L positions to keep for each sequence, the first ones, for padding at the end. By default all.
        The cache must be ragged, and have room for all L.
    donate : bool
        Whether the arrays of the cache may be written over, so that a step copies none of them. Afterwards, only the
        cache that is returned may be used. PyTorch, NumPy and JAX write in place; other libraries copy all the same.
        Inside ``jax.jit`` and its loops the compiler decides: donate the cache to the jitted function.
    xp : array namespace, optional

    Raises
    ------
    TypeError
        When dtypes do not fit.
    ValueError
        When shapes or devices do not fit, or there is no room for L more positions (if lengths can be read).

    Notes
    -----
    In a compiled loop lengths cannot be read. There, positions beyond the capacity are dropped, no filled position is
    overwritten, and the length keeps counting. A length above the capacity shows that positions are missing.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> cache = empty_cache((), 1, 4, 1, xp=xp)
    >>> one = xp.ones((1, 1, 1), dtype=xp.float32)
    >>> cache = append(append(cache, one, one), 2 * one, one)
    >>> cache.key[0, :, 0]
    Array([1., 2., 0., 0.], dtype=array_api_strict.float32)
    """
    check_parameters("cache", cache, KeyValueCache)
    num_new = as_constant(num_new, cache.key)
    xp = _check_call(key=key, value=value, cache=cache, num_new=num_new, donate=donate, xp=xp)
    count = sizes(key)[-2]
    with without_warnings(cache.key):
        check_num_new(num_new, cache.length, count)
        check_room(cache.length, count, sizes(cache.key)[-2])
        return extended(cache, key, value, num_new, donate=donate, xp=xp)


def extended(
    cache: KeyValueCache, key: Array, value: Array, num_new: Array | None, *, donate: bool, xp: Namespace
) -> KeyValueCache:
    """The body of `append`, of arguments that were checked."""
    length = xp.astype(cache.length, xp.int32)
    count = shape(key, xp=xp)[-2]
    filled = count if num_new is None else xp.astype(num_new, xp.int32)
    return KeyValueCache(
        _written(cache.key, key, length, donate, xp=xp),
        _written(cache.value, value, length, donate, xp=xp),
        xp.add(length, filled),
    )


def cache_mask(cache: KeyValueCache | Array, num_new: Any = 1, /) -> Mask:
    """Make the mask for the newest positions as queries: each attends to those before, and to itself.

    Parameters
    ----------
    cache : KeyValueCache or Array of int
        The cache, or its lengths, after the new positions are appended.
    num_new : int or Array of int, shape () or (...)
        The number of positions that were appended.

    Returns
    -------
    Mask
        ``Causal(offset=length - num_new)``, with ``KeyLengths(length)`` where num_new is an array.

    Raises
    ------
    TypeError, ValueError
        When lengths or num_new are not integers.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> cache_mask(xp.asarray(3), 2).to_array(2, 4, xp=xp)
    Array([[ True,  True, False, False],
           [ True,  True,  True, False]], dtype=array_api_strict.bool)
    """
    length = cache.length if isinstance(cache, KeyValueCache) else cache
    check_shapes("length: ... integer", {"length": length})
    num_new = plain_integer(num_new)
    is_array = only_array(num_new) is not None
    if not is_array:
        check_positive("num_new", num_new, most=MAX_POSITIONS)
    else:
        check_shapes("num_new: to ... integer", {"num_new": num_new}, {"...": sizes(length) or OPEN_AXES})
        length, num_new = as_constant(length, num_new), as_constant(num_new, length)
    xp = common_namespace(None, {"length": length, "num_new": num_new})
    length, num_new = xp.astype(length, xp.int32), xp.astype(num_new, xp.int32) if is_array else num_new
    with without_warnings(length):
        rule = Causal(offset=xp.subtract(length, num_new))
    return And(rule, KeyLengths(length)) if is_array else rule


def _written(old: Array, new: Array, length: Array, donate: bool, *, xp: Namespace) -> Array:
    """Write new rows behind the filled ones: (..., G, C, D), (..., G, L, D), () or (...) -> (..., G, C, D)."""
    capacity, count = shape(old, xp=xp)[-2], shape(new, xp=xp)[-2]
    update_rows = backend_for(old, xp).update_rows
    if isinstance(count, int) and count == 0:
        return old
    is_known = isinstance(count, int) and isinstance(capacity, int)
    if update_rows is not None and is_known and is_concrete(length):
        return update_rows(old, new, length, donate=donate)
    # A row for each sequence would have to be gathered, which JAX refuses in a mesh with explicit axes.
    if update_rows is None or not is_known or len(length.shape):
        return _overlaid(old, new, xp.subtract(positions(capacity, old, xp=xp), xp.expand_dims(length, axis=-1)), xp=xp)
    start = clipped(length, capacity - count + 1, xp=xp)  # of as many rows, all within the capacity
    index = xp.add(xp.expand_dims(start, axis=-1), positions(count, old, xp=xp))
    rows = _overlaid(_rows_at(old, index, xp), new, xp.subtract(index, xp.expand_dims(length, axis=-1)), xp=xp)
    return update_rows(old, rows, start, donate=donate)


def _overlaid(old: Array, new: Array, behind: Array, *, xp: Namespace) -> Array:
    """Take new rows where an index is in their range: (..., G, C, D), (..., G, L, D), (..., C) -> (..., G, C, D)."""
    count = shape(new, xp=xp)[-2]
    if isinstance(count, int) and count == 1:
        return xp.where(_over_heads(xp.equal(behind, 0), xp), new, old)
    here = xp.logical_and(xp.greater_equal(behind, 0), xp.less(behind, count))
    if is_counted(count):  # it may be 0 in a graph, and `take` needs a row
        new = xp.concat([new, xp.zeros_like(old[..., :1, :])], axis=-2)
        count = xp.add(count, 1)
    index = clipped(behind, count, xp=xp)
    return xp.where(_over_heads(here, xp), _rows_at(new, index, xp), old)


def _rows_at(new: Array, index: Array, xp: Namespace) -> Array:
    """Take rows by one index, or one for each sequence: (..., G, L, D), (C,) or (..., C) -> (..., G, C, D)."""
    if len(index.shape) == 1:
        return xp.take(new, xp.astype(index, index_dtype(index, xp=xp)), axis=-2)
    *leading, heads, count, width = shape(new, xp=xp)
    wide = index_dtype(index, xp=xp)
    capacity = shape(index, xp=xp)[-1]
    groups = xp.reshape(new, (-1, count, width))
    index = xp.broadcast_to(xp.expand_dims(index, axis=-2), (*leading, heads, capacity))
    start = xp.multiply(xp.arange(shape(groups, xp=xp)[0], dtype=wide, **on_device_of(new)), count)
    flat = xp.add(xp.reshape(xp.astype(index, wide), (-1, capacity)), xp.expand_dims(start, axis=-1))
    rows = xp.take(xp.reshape(new, (-1, width)), xp.reshape(flat, (-1,)), axis=0)
    return xp.reshape(rows, (*leading, heads, capacity, width))


def _over_heads(condition: Array, xp: Namespace) -> Array:
    """Insert axes for heads and channels: (..., C) -> (..., 1, C, 1)."""
    return xp.expand_dims(xp.expand_dims(condition, axis=-1), axis=-3)


_CACHE = "cache.key: ... G C D, cache.value: ... G C E like cache.key"
_NEW = "key: ... G L D like cache.key, value: ... G L E like cache.value"


def check_cache(cache: KeyValueCache) -> dict[str, Any]:
    """Raise unless the arrays of a cache fit together; return the size of each letter."""
    known = check_shapes(_CACHE, {"cache": cache})
    check_rank("cache.length", cache.length, 0, "() or (...)")
    leading = "..." if len(cache.length.shape) else ""
    return check_shapes(f"cache.length: {leading} integer on cache.key", {"cache": cache}, known)


@once_per_signature
def _check_call(*, key: Array, value: Array, cache: KeyValueCache, num_new: Any, donate: Any, xp: Any) -> Namespace:
    """Raise unless new keys and values fit a cache, whose lengths are not read here; return the namespace."""
    xp = common_namespace(xp, {"cache": cache, "key": key, "value": value, "num_new": num_new})
    check_flags(donate=donate)
    check_shapes(_NEW, {"key": key, "value": value, "cache": cache}, check_cache(cache), _row_hint)
    return xp


def _row_hint(name: str, array: Array, known: dict[str, Any]) -> str:
    """What to write for new keys without the axis of positions."""
    is_row = not shapes_differ(sizes(array), (*known["..."], known["G"], known["D" if name == "key" else "E"]))
    return f": xp.expand_dims({name}, axis=-2) is one position" if is_row else ""


def check_num_new(num_new: Array | None, length: Array, count: int | None) -> None:
    """Raise unless this tells for each length how many of so many positions to keep."""
    if num_new is not None:
        arrays = {"num_new": num_new, "cache.length": length}
        check_rank("num_new", num_new, 1, "(...)")
        check_shapes("num_new: to ... integer on cache.length", arrays, {"...": sizes(length)})
        check_within("num_new", num_new, count)


def check_room(length: Array, count: int | None, capacity: int | None) -> None:
    """Raise if lengths that can be read are negative, or leave no room for so many more positions."""
    if count is None or capacity is None:
        return
    least, filled = value_range(length)
    if least < 0:
        raise ValueError(f"expected lengths of a cache from 0 on; got {least}")
    if filled + count > capacity:
        raise ValueError(f"expected room for {count} more positions in a cache of {capacity}; got {filled} filled")


publish(vars(), __all__)
