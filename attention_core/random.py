r"""Random numbers that depend on a seed and a position, and on nothing else.

A 32-bit word is drawn by hashing the words of seed and position, one after the other, with the finalizer of
MurmurHash3: shifts, exclusive-ors and multiplications by constants. Words are held as int32. Products wrap around where
arrays are eager and on a host, and in XLA; elsewhere they are taken in int64, in which none overflows. So all libraries
give the same bits: eager or compiled, whole or in blocks.

References
----------
A. Appleby, MurmurHash3 (``fmix32``), 2011.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

from ._arrays import (
    Array,
    Namespace,
    index_dtype,
    on_device_of,
    one_program,
    positions,
    shape,
    shape_text,
)
from ._backend import (
    Backend,
    Operation,
    backend_for,
    can_be_read,
    is_compiling,
    is_exporting,
    is_on_host,
    numbers_of,
    own_namespace,
    register,
)
from ._checks import check_integer, check_sizes, number_text, plain_integer
from ._keywords import names_keywords, unconverted

__all__ = [
    "Dropout",
    "check_dropout",
    "check_dropout_rate",
    "drop",
    "dropout_mask",
    "fmix32",
    "fold_in",
    "hash_words",
    "kept_at",
    "plain_seed",
    "random_bits",
    "seed_words",
    "seeded",
]

_GOLDEN = 0x9E3779B9  # its multiples make the hash depend on the order of words
_FLAT, _LEADING, _FOLDED = 0, 1, 2  # purposes: the streams under one seed are independent
_RESOLUTION = 24  # bits of a uniform number: those of a float32


class Dropout(NamedTuple):
    """Dropout with an explicit seed: the seed and the position of an element decide whether it is dropped.

    Attributes
    ----------
    rate : float
        The share of elements that become 0, in [0, 1); the others are multiplied by `scale`.
    seed : int, Array, or generator
        A Python integer in [0, 2**64), or an integer array of shape () or (2,): 32-bit words, the low one first. Each
        step of training needs another. The library's own sources are taken, too, and each call draws a seed: a typed
        key of JAX, a ``Generator`` of PyTorch, NumPy or TensorFlow, a ``SeedGenerator`` of Keras.
    """

    rate: float
    seed: Any

    @property
    def scale(self) -> float:
        """The factor of the elements that are kept, 1 / (1 - rate), which keeps the expectation."""
        return 1 / (1 - self.rate)


def _new(_cls: type[Dropout], rate: float, seed: Any) -> Any:
    may_be_rate = (
        isinstance(rate, Real) and not isinstance(rate, int) and 0 <= rate < 1
    )  # else it is told when it is used
    return tuple.__new__(_cls, (float(rate) if may_be_rate else rate, seed))


Dropout.__new__ = names_keywords(_new, "Dropout")  # type: ignore[method-assign, assignment]


def check_dropout(dropout: Any) -> None:
    """Raise unless this is a `Dropout` with a rate in [0, 1). The library knows what its sources of seeds are."""
    if not isinstance(dropout, Dropout):
        raise TypeError(f"expected dropout as Dropout(rate, seed); got {type(dropout).__name__}")
    check_dropout_rate(dropout.rate)


def check_dropout_rate(rate: Any) -> None:
    """Raise unless this is a number in [0, 1)."""
    if isinstance(rate, bool) or not isinstance(rate, Real):
        raise TypeError(f"expected a dropout rate as a number; got {type(rate).__name__}")
    if not 0 <= rate < 1:  # type: ignore[operator]
        raise ValueError(f"expected a dropout rate in [0, 1); got {number_text(rate)}")


def seeded(dropout: Dropout | None, x: Array, xp: Namespace) -> Dropout | None:
    """Draw the seed if it is a source of seeds of the library of an array, and check it."""
    if dropout is None:
        return None
    seed = dropout.seed if isinstance(dropout.seed, int) else backend_for(x, xp).draw_seed(dropout.seed)
    check_seed(seed)
    return Dropout(dropout.rate, seed)


def plain_seed(seed: Any, is_array: Callable[[Any], bool], /) -> Any:
    """Turn integers of any type into a Python integer, and leave arrays of the library and ``None`` as they are.

    Raises
    ------
    TypeError
        When the seed is neither an integer nor such an array.
    """
    if seed is None or isinstance(seed, int) or is_array(seed):
        return seed
    try:
        return operator.index(seed)
    except TypeError as error:
        raise TypeError(f"expected a seed as an integer or an integer array; got {type(seed).__name__}") from error


def check_seed(seed: Any) -> None:
    """Raise unless this is an integer in [0, 2**64) or an integer array of one or two words."""
    seed = plain_integer(seed)
    if isinstance(seed, int) and not isinstance(seed, bool):
        if not 0 <= seed < 2**64:
            raise ValueError(f"expected a seed in [0, 2**64); got {number_text(seed)}")
    elif not hasattr(seed, "dtype"):
        raise TypeError(f"expected a seed as an integer or an integer array; got {type(seed).__name__}")
    else:
        check_integer("seed", seed)
        if tuple(seed.shape) not in ((), (2,)):
            raise ValueError(f"expected a seed of shape () or (2,); got {shape_text(seed)}")


def seed_words(seed: Any, /, *, xp: Namespace) -> tuple[Any, Any]:
    """Split a seed into its 32-bit words, low and high: two integers, or two int32 arrays of shape (1,).

    They are integers wherever the seed can be read, as hashing these takes less time than an operation of an array.

    Parameters
    ----------
    seed : int or Array
        As in `Dropout`.
    xp : array namespace
    """
    check_seed(seed)
    seed = plain_integer(seed)
    if isinstance(seed, int):
        return _signed(seed), _signed(seed >> 32)
    words = xp.reshape(xp.astype(seed, xp.int32), (-1,))
    if can_be_read(words):
        low, *high = numbers_of(words)
        return low, high[0] if high else 0
    low = words[:1]
    return low, (words[1:] if len(seed.shape) else xp.zeros_like(low))


def hash_words(*words: Any, xp: Namespace) -> Array:
    r"""Hash words of 32 bits, one after the other, into one.

    .. math:: h_0 = 0, \qquad h_n = \operatorname{fmix}(h_{n-1} \oplus \operatorname{fmix}(w_n \oplus n g))

    with g = 0x9E3779B9 and products modulo :math:`2^{32}`.

    Parameters
    ----------
    *words : int or int32 Array, which broadcast
        Leading integers are hashed in Python.
    xp : array namespace

    Returns
    -------
    int32 Array
        Or an integer if all words are integers.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> one = xp.ones((1,), dtype=xp.int32)
    >>> int(hash_words(one, one, xp=xp)[0])
    711129241
    """
    state: Any = 0
    for index, word in enumerate(words, start=1):
        state = _joined(_joined(word, index * _GOLDEN, xp), state, xp)
    return state


def _joined(first: Any, second: Any, xp: Namespace) -> Any:
    """`fmix32` of the bits in which two words differ: integers of Python, or int32 arrays."""
    if isinstance(first, int):
        return _mixed(first ^ second) if isinstance(second, int) else _joined(second, first, xp)
    return one_program(_mix, xp)(first, _signed(second) if isinstance(second, int) else second, xp=xp)


def _mix(first: Array, second: Any, *, xp: Namespace) -> Array:
    return fmix32(xp.bitwise_xor(first, second), xp=xp)


def _mixed(word: int) -> int:
    """`fmix32` of a Python integer."""
    word &= 0xFFFFFFFF
    word = (word ^ word >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    word = (word ^ word >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return word ^ word >> 16


def fmix32(word: Array, /, *, xp: Namespace) -> Array:
    """Mix the bits of int32 words so that each depends on all: the finalizer of MurmurHash3.

    Examples
    --------
    The hash of 1 is 0x514e28b7:

    >>> import array_api_strict as xp
    >>> int(fmix32(xp.ones((1,), dtype=xp.int32), xp=xp)[0]) == 0x514E28B7
    True
    """
    return _xor_shifted(_multiplied(_xor_shifted(word, 16, xp), xp), 16, xp)


def _multiplied(word: Array, xp: Namespace) -> Array:
    """What stands between the outer shifts of `fmix32`."""
    word = _product(word, _signed(0x85EBCA6B), xp)
    return _product(_xor_shifted(word, 13, xp), _signed(0xC2B2AE35), xp)


def _xor_shifted(word: Array, distance: int, xp: Namespace) -> Array:
    return xp.bitwise_xor(word, _shift_right(word, distance, xp))


def _product(word: Array, factor: int, xp: Namespace) -> Array:
    """The lower 32 bits of a product: both factors are below 2^31 in magnitude, so that 64 bits hold it.

    An eager product wraps around. A compiler may rule out that it overflows.
    """
    if can_be_read(word):
        return xp.multiply(word, factor)
    wide = index_dtype(word, xp=xp)
    return xp.astype(xp.multiply(xp.astype(word, wide), factor), xp.int32)


def fold_in(seed: Any, number: int, /, *, xp: Namespace) -> Any:
    """Derive a new seed from a seed and a number: an integer, or two words."""
    seed = plain_integer(seed)
    if not isinstance(seed, int) and _is_step(seed):
        return backend_for(seed, xp).custom_gradient(FOLDED, _Number(number), (seed,))[0]
    low, high = (hash_words(*seed_words(seed, xp=xp), _FOLDED, number, word, xp=xp) for word in (0, 1))
    if isinstance(seed, int):
        return low | high << 32
    if isinstance(low, int):
        return xp.asarray([_signed(low), _signed(high)], dtype=xp.int32, **on_device_of(seed))
    return xp.concat([low, high], axis=0)


def _is_step(array: Array) -> bool:
    """Whether hashing is one step of a program: of one that PyTorch compiles for a host, and exports to nowhere else.

    What it hashes is few numbers, but in hundreds of operations, which take ten times as long to be compiled as a
    layer. An accelerator would be called for each of them.
    """
    return is_compiling(array) and is_on_host(array) and not is_exporting(array)


class _Number(NamedTuple):
    """The plan of a fold: what is folded in."""

    number: int


def _folded(plan: _Number, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    return (fold_in(arrays[0], plan.number, xp=backend.namespace),)


def _folded_abstract(plan: _Number, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    return (backend.namespace.zeros((2,), dtype=backend.namespace.int32),)


FOLDED = register("random.folded", Operation(_folded, lambda *_: (None,), _folded_abstract))


def check_elements(dims: Any) -> tuple[int, ...]:
    """Return a shape with integers of Python, once it is known to have no more elements than there are counters."""
    found = check_sizes("a shape", dims)
    if math.prod(found) >= 2**31:
        raise ValueError(f"expected fewer than 2**31 elements, the counters there are; got {found}")
    return found


def random_bits(seed: Any, dims: tuple[int, ...], /, *, xp: Namespace, device: Any = None) -> Array:
    """Draw uniformly distributed int32 words; the word at flat position n depends on the seed and n alone.

    Without a device they are where the library makes arrays, wherever the seed is.

    Raises
    ------
    TypeError, ValueError
        When the seed is not one of `Dropout`.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> random_bits(7, (2, 3), xp=xp).shape
    (2, 3)
    """
    xp = own_namespace(xp)
    dims = check_elements(dims)
    like = {} if device is None else {"device": device}
    index = xp.arange(math.prod(dims), dtype=xp.int32, **like)
    return xp.reshape(hash_words(*seed_words(seed, xp=xp), _FLAT, index, xp=xp), dims)


def dropout_mask(dropout: Dropout, like: Array, /, *, xp: Namespace) -> Array:
    """True where an element of an array shaped like ``like`` is kept.

    Parameters
    ----------
    dropout : Dropout
    like : Array, shape (..., M, N)
    xp : array namespace

    Returns
    -------
    Array of bool, shape (..., M, N)
    """
    *leading, rows, columns = shape(like, xp=xp)
    index = xp.arange(math.prod(leading), dtype=xp.int32, **on_device_of(like))
    row = xp.reshape(positions(rows, like, xp=xp), (-1, 1))
    return kept_at(dropout, xp.reshape(index, (*leading, 1, 1)), row, positions(columns, like, xp=xp), xp=xp)


def kept_at(dropout: Dropout, sample: Array, row: Array, column: Array, /, *, xp: Namespace) -> Array:
    """True where the elements at these positions are kept.

    The seed and the position are hashed, so that each element is decided alone, and blocks agree with the whole.

    Parameters
    ----------
    dropout : Dropout
    sample, row, column : Array of int32, which broadcast
        The position: leading axes counted as one, in row-major order, and the last two axes.
    xp : array namespace
    """
    rows, columns = _hashed_in_a_step(dropout.seed, sample, row, column, xp=xp)
    least = round(dropout.rate * 2**_RESOLUTION)
    flipped = _signed(2**31 | least >> 8 & 0xFF00)
    return one_program(_are_kept, xp)(rows, columns, flipped, least - 2 ** (_RESOLUTION - 1), xp=xp)


def _hashed_in_a_step(seed: Any, *at: Array, xp: Namespace) -> tuple[Array, ...]:
    """What `_hashed` gives. Integers are arrays of a step, so that one program serves all seeds."""
    if not _is_step(at[0]):
        return _hashed(seed, *at, xp=xp)
    if isinstance(plain_integer(seed), int):
        seed = xp.concat([xp.full((1,), word, dtype=xp.int32) for word in seed_words(seed, xp=xp)])
    return backend_for(at[0], xp).custom_gradient(HASHED, (), (seed, *at))


def _hashed(seed: Any, sample: Array, row: Array, column: Array, *, xp: Namespace) -> tuple[Array, Array]:
    """The hash of all words but the last, and what the last is before it joins."""
    rows = hash_words(*seed_words(seed, xp=xp), _LEADING, sample, row, xp=xp)
    return rows, _joined(column, 6 * _GOLDEN, xp)  # the sixth word


def _hashed_abstract(_: Any, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    _, sample, row, column = arrays
    return backend.namespace.add(sample, row), backend.namespace.zeros_like(column)


def _hashed_forward(_: Any, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    return _hashed(*arrays, xp=backend.namespace)


HASHED = register("random.hashed", Operation(_hashed_forward, lambda *_: (None,) * 4, _hashed_abstract))


def _are_kept(rows: Array, columns: Array, flipped: int, least: int, *, xp: Namespace) -> Array:
    """Whether `uniform_integers` of the hash of rows and columns are at least so large, in few passes over all pairs.

    The first shift of `fmix32` goes to each of them. The last one changes the lower half of a word by the upper half.
    That decides only where the upper half is the bound's. So ``flipped`` has the bits of that one; and the sign, as
    words are compared as signed integers.
    """
    first, second = (_xor_shifted(word, 16, xp) for word in (rows, columns))
    word = xp.bitwise_xor(_multiplied(xp.bitwise_xor(first, second), xp), flipped)
    return xp.greater_equal(xp.bitwise_right_shift(word, 32 - _RESOLUTION), least)


def drop(x: Array, dropout: Dropout | None, /, *, xp: Namespace) -> Array:
    """Apply dropout to an array."""
    if dropout is None or dropout.rate == 0:
        return x
    if len(x.shape) == 1:
        return xp.squeeze(drop(xp.expand_dims(x, axis=0), dropout, xp=xp), axis=0)
    kept = xp.astype(dropout_mask(dropout, x, xp=xp), x.dtype)  # choosing by a random mask takes ten times as long
    return xp.multiply(xp.multiply(x, kept), dropout.scale)


def uniform_integers(bits: Array, /, *, xp: Namespace) -> Array:
    """The upper 24 bits of 32-bit words, as integers in [0, 2**24)."""
    return _shift_right(bits, 32 - _RESOLUTION, xp)


def _shift_right(x: Array, distance: int, xp: Namespace) -> Array:
    """Shift zeros in from the left: the copies of the sign that signed integers shift in are cleared."""
    return xp.bitwise_and(xp.bitwise_right_shift(x, distance), 2 ** (32 - distance) - 1)


def _signed(word: int) -> int:
    """The lower 32 bits as a signed integer; without a branch, so that one program serves all seeds."""
    return (word + 2**31) % 2**32 - 2**31


for _name in __all__:
    unconverted(vars()[_name])
