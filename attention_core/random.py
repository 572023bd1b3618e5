r"""Random numbers that depend on a seed and a position, and on nothing else.

The generator is pcg4d, a hash of four words of 32 bits made of multiplications, additions and shifts. It is written
here in int32 arithmetic, which wraps around on every library, so that all of them give the same bits: eager or
compiled, whole or in blocks. It needs a tenth of the operations of a block cipher such as Threefry; and compilers that
substitute expressions into each other take minutes over the many rounds of a cipher, and seconds over this.

References
----------
M. Jarzynski, M. Olano, "Hash functions for GPU rendering", Journal of Computer Graphics Techniques 9(3), 2020.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attention_core._checks import check_integer, shape_text
from attention_core._namespace import beside, positions, shape
from attention_core._typing import Array, Namespace

__all__ = ["Dropout", "dropout_mask", "fold_in", "pcg4d", "random_bits", "seed_words"]

_MULTIPLIER, _INCREMENT = 1664525, 1013904223
_FLAT, _LEADING, _FOLDED = (
    0,
    1,
    2,
)  # the last word of the counters: what is drawn for one purpose is fresh for the others
_RESOLUTION = 24  # bits of a uniform number: those of a float32


class Dropout(NamedTuple):
    """Dropout, given explicitly: what is dropped depends on the seed and on the position of an element alone.

    Attributes
    ----------
    rate : float
        The share of elements that become 0, in [0, 1); the others are multiplied by 1 / (1 - rate).
    seed : int or Array
        A Python integer in [0, 2**64), or an integer array of shape () or (2,): 32-bit words, the low one first.
    """

    rate: float
    seed: Any = 0


def check_dropout(dropout: Any) -> None:
    """Raise unless this is a `Dropout` with a rate in [0, 1) and a seed."""
    if not isinstance(dropout, Dropout):
        raise TypeError(f"expected dropout as Dropout(rate, seed); got {type(dropout).__name__}")
    rate, seed = dropout
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise TypeError(f"expected a dropout rate as a number; got {type(rate).__name__}")
    if not 0 <= rate < 1:
        raise ValueError(f"expected a dropout rate in [0, 1); got {rate}")
    check_seed(seed)


def check_seed(seed: Any) -> None:
    """Raise unless this is an integer in [0, 2**64) or an integer array of one or two words."""
    if hasattr(seed, "dtype"):
        check_integer("seed", seed)
        if tuple(seed.shape) not in ((), (2,)):
            raise ValueError(f"expected a seed of shape () or (2,); got {shape_text(seed)}")
    elif isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"expected a seed as an integer or an integer array; got {type(seed).__name__}")
    elif not 0 <= seed < 2**64:
        raise ValueError(f"expected a seed in [0, 2**64); got {seed}")


def seed_words(seed: Any, like: dict[str, Any], /, *, xp: Namespace) -> tuple[Array, Array]:
    """The two 32-bit words of a seed, low and high, as int32 arrays of shape (1,).

    Parameters
    ----------
    seed : int or Array
        As in `Dropout`.
    like : dict
        Keyword arguments that place a new array.
    xp : array namespace
    """
    check_seed(seed)
    if isinstance(seed, int):
        return tuple(xp.full((1,), _signed(word), dtype=xp.int32, **like) for word in (seed, seed >> 32))
    words = xp.reshape(xp.astype(seed, xp.int32), (-1,))
    low = words[:1]
    return low, (words[1:] if len(seed.shape) else xp.zeros_like(low))


def pcg4d(words: tuple[Any, Any, Any, Any], /, *, xp: Namespace) -> tuple[Array, Array, Array, Array]:
    """Hash four words of 32 bits into four.

    Parameters
    ----------
    words : four int32 Array, which broadcast
    xp : array namespace

    Returns
    -------
    four int32 Array

    Examples
    --------
    >>> import array_api_strict as xp
    >>> zero = xp.zeros((1,), dtype=xp.int32)
    >>> [int(word[0]) for word in pcg4d((zero, zero, zero, zero), xp=xp)]
    [251852841, 760645481, 850445371, -752531222]
    """
    x, y, z, w = (_scrambled(word, xp) for word in words)
    x, y, z, w = (xp.bitwise_xor(word, _shift_right(word, 16, xp)) for word in _mixed(x, y, z, w, xp))
    return _mixed(x, y, z, w, xp)


def _scrambled(word: Array, xp: Namespace) -> Array:
    """One step of a congruential generator; the mask stops compilers that fold constants in unlimited integers."""
    return xp.bitwise_and(xp.add(xp.multiply(word, _MULTIPLIER), _INCREMENT), -1)


def _mixed(x: Array, y: Array, z: Array, w: Array, xp: Namespace) -> tuple[Array, Array, Array, Array]:
    x = xp.add(x, xp.multiply(y, w))
    y = xp.add(y, xp.multiply(z, x))
    z = xp.add(z, xp.multiply(x, y))
    return x, y, z, xp.add(w, xp.multiply(y, z))


def fold_in(seed: Any, number: int, like: dict[str, Any], /, *, xp: Namespace) -> Array:
    """A new seed out of a seed and a number: one for every place that needs its own.  -> int32 Array, shape (2,)."""
    numbers = (xp.full((1,), word, dtype=xp.int32, **like) for word in (number, _FOLDED))
    return xp.concat(pcg4d((*seed_words(seed, like, xp=xp), *numbers), xp=xp)[:2], axis=0)


def random_bits(seed: Any, dims: tuple[int, ...], /, *, xp: Namespace, device: Any = None) -> Array:
    """Uniformly distributed int32 words; the word at flat position n depends on the seed and n alone.

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
    like = {} if device is None else {"device": device}
    index = xp.arange(math.prod(dims), dtype=xp.int32, **like)
    purpose = xp.full((1,), _FLAT, dtype=xp.int32, **like)
    return xp.reshape(pcg4d((*seed_words(seed, like, xp=xp), index, purpose), xp=xp)[1], dims)


def dropout_mask(dropout: Dropout, like: Array, /, *, xp: Namespace) -> Array:
    """True where an element of an array shaped like ``like`` is kept.

    The leading axes, counted as one in row-major order, pick two words under the seed; the last two axes are the
    others. So an element can be decided alone, and blocks agree with the whole.

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
    place = beside(like)
    index = xp.arange(math.prod(leading), dtype=xp.int32, **place)
    purpose = xp.full((1,), _LEADING, dtype=xp.int32, **place)
    words = pcg4d((*seed_words(dropout.seed, place, xp=xp), index, purpose), xp=xp)
    key = tuple(xp.reshape(word, (*leading, 1, 1)) for word in words[:2])
    row = xp.reshape(positions(rows, like, xp=xp), (-1, 1))
    bits = pcg4d((*key, row, positions(columns, like, xp=xp)), xp=xp)[1]
    return xp.greater_equal(uniform_integers(bits, xp=xp), round(dropout.rate * 2**_RESOLUTION))


def drop(x: Array, dropout: Dropout | None, /, *, xp: Namespace) -> Array:
    """The array with some elements 0, and the others made up for it."""
    if dropout is None or dropout.rate == 0:
        return x
    return xp.multiply(xp.where(dropout_mask(dropout, x, xp=xp), x, 0.0), 1 / (1 - dropout.rate))


def uniform_integers(bits: Array, /, *, xp: Namespace) -> Array:
    """The upper 24 bits of 32-bit words, as integers in [0, 2**24)."""
    return _shift_right(bits, 32 - _RESOLUTION, xp)


def _shift_right(x: Array, distance: int, xp: Namespace) -> Array:
    """Shift zeros in from the left: the shift of signed integers copies the sign, which is cleared."""
    return xp.bitwise_and(xp.bitwise_right_shift(x, distance), 2 ** (32 - distance) - 1)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word
