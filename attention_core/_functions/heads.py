"""Split channels into heads, and merge heads into channels."""

from __future__ import annotations

from .._arrays import Array, Namespace, move_axis, one_program, shape
from .._backend import common_namespace
from .._checks import check_positive, check_shapes


def split_heads(x: Array, num_heads: int, /, *, xp: Namespace | None = None) -> Array:
    """Split the channels of each position into heads.

    .. math:: y_{h, l, d} = x_{l, h D + d}

    Parameters
    ----------
    x : Array, shape (..., L, H * D)
    num_heads : int
        H; it divides the number of channels.
    xp : array namespace, optional

    Returns
    -------
    Array, shape (..., H, L, D)

    Raises
    ------
    ValueError
        When the number of heads does not divide the channels.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> split_heads(xp.zeros((2, 5, 12)), 3).shape
    (2, 3, 5, 4)
    """
    xp = common_namespace(xp, {"x": x})
    num_heads = check_positive("num_heads", num_heads)
    check_shapes("x: ... L H*D", {"x": x}, {"H": num_heads})
    return one_program(split_channels, xp)(x, num_heads=num_heads, xp=xp)


def merge_heads(x: Array, /, *, xp: Namespace | None = None) -> Array:
    """Merge the heads of each position into channels: the inverse of `split_heads`.

    .. math:: y_{l, h D + d} = x_{h, l, d}

    Parameters
    ----------
    x : Array, shape (..., H, L, D)
    xp : array namespace, optional

    Returns
    -------
    Array, shape (..., L, H * D)

    Raises
    ------
    ValueError
        When ``x`` has fewer than three axes.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> merge_heads(xp.zeros((2, 3, 5, 4))).shape
    (2, 5, 12)
    """
    xp = common_namespace(xp, {"x": x})
    check_shapes("x: ... H L D", {"x": x})
    return one_program(merge_channels, xp)(x, xp=xp)


def split_channels(x: Array, *, num_heads: int, xp: Namespace) -> Array:
    """The body of `split_heads`: (..., L, H * D) -> (..., H, L, D)."""
    *leading, length, channels = shape(x, xp=xp)
    return move_axis(xp.reshape(x, (*leading, length, num_heads, channels // num_heads)), -2, -3, xp)


def merge_channels(x: Array, *, xp: Namespace) -> Array:
    """The body of `merge_heads`: (..., H, L, D) -> (..., L, H * D)."""
    *leading, heads, length, width = shape(x, xp=xp)
    return xp.reshape(move_axis(x, -3, -2, xp), (*leading, length, heads * width))
