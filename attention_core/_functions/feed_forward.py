"""Affine maps, activations, and the feed-forward blocks of a transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._arithmetic import ACTIVATIONS, ARITHMETICS
from .._arrays import Array, Namespace, cast_to, upcast
from .._backend import with_autocast
from .._checks import check_choice, check_parameters, linear_shapes, once_per_signature
from ..parameters import FeedForward, GatedFeedForward, Linear
from ..random import Dropout, check_dropout, seed_array, seeded
from .normalization import check_map


@with_autocast(position=1)
def linear(parameters: Linear, x: Array, /, *, arithmetic: str = "fast", xp: Namespace | None = None) -> Array:
    r"""Apply an affine map to the channels.

    .. math:: y = x W + b

    Parameters
    ----------
    parameters : Linear
        ``weight`` of shape (in, out), ``bias`` of shape (out,) or ``None``; of the dtype of ``x``.
    x : Array, shape (..., in)
        16-bit types are computed in float32 and rounded once.
    arithmetic, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Array, shape (..., out)

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.parameters import Linear
    >>> linear(Linear(xp.asarray([[1.0], [2.0]]), xp.asarray([0.5])), xp.asarray([[3.0, 4.0]]))
    Array([[11.5]], dtype=array_api_strict.float64)
    """
    check_parameters("linear", parameters, Linear)
    xp = check_map(x=x, linear=parameters, line=_LINEAR, arithmetic=arithmetic, xp=xp)
    dtype = x.dtype
    (weight, bias), x = upcast((parameters, x), xp=xp)
    return cast_to(ARITHMETICS[arithmetic].affine(x, weight, bias, xp=xp), dtype, xp=xp)


_LINEAR = linear_shapes("linear", "x: floating ... in", "out")


@with_autocast(lowers=False)
def gelu(x: Array, /, *, arithmetic: str = "fast", xp: Namespace | None = None) -> Array:
    r"""Apply the Gaussian error linear unit, in its exact form (no tanh).

    .. math:: x\, \Phi(x) = \tfrac{x}{2} \operatorname{erfc}\!\left(-\tfrac{x}{\sqrt 2}\right)

    Parameters
    ----------
    x : Array
        Of a floating-point dtype; 16-bit types are computed in float32.
    arithmetic, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Array
        Of the shape and dtype of ``x``.

    References
    ----------
    D. Hendrycks, K. Gimpel, "Gaussian error linear units", 2016.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> [round(float(y), 6) for y in gelu(xp.asarray([-1.0, 0.0, 1.0]))]
    [-0.158655, 0.0, 0.841345]
    """
    return _activated("gelu", x, arithmetic, xp)


@with_autocast(lowers=False)
def silu(x: Array, /, *, arithmetic: str = "fast", xp: Namespace | None = None) -> Array:
    r"""Apply the sigmoid linear unit, also known as swish.

    .. math:: x\, \sigma(x) = \frac{x}{1 + e^{-x}}

    Parameters
    ----------
    x : Array
        Of a floating-point dtype; 16-bit types are computed in float32.
    arithmetic, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Array
        Of the shape and dtype of ``x``.

    Notes
    -----
    In fast arithmetic, a backend may lend its library's own function. That may be 0 where the exponential of ``-x``
    overflows.

    References
    ----------
    D. Hendrycks, K. Gimpel, "Gaussian error linear units", 2016. P. Ramachandran et al., "Searching for activation
    functions", 2017.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> [round(float(y), 6) for y in silu(xp.asarray([-1.0, 0.0, 1.0]))]
    [-0.268941, 0.0, 0.731059]
    """
    return _activated("silu", x, arithmetic, xp)


@with_autocast(position=1)
def feed_forward(
    parameters: FeedForward,
    x: Array,
    /,
    *,
    activation: str = "gelu",
    dropout: Dropout | None = None,
    arithmetic: str = "fast",
    xp: Namespace | None = None,
) -> Array:
    r"""Apply two affine maps to each position, with an activation in between.

    .. math:: y = \operatorname{gelu}(x W_1 + b_1)\, W_2 + b_2

    Parameters
    ----------
    parameters : FeedForward
        ``expand`` of shape (C, inner) and ``contract`` of shape (inner, out).
    x : Array, shape (..., C)
        16-bit types are computed in float32 and rounded once.
    activation : {"gelu", "gelu_tanh", "relu", "silu"}
        The GELU is exact, without tanh.
    dropout : Dropout, optional
        Applied to the result.
    arithmetic, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Array, shape (..., out)

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.parameters import FeedForward, Linear
    >>> one = Linear(xp.ones((1, 1)))
    >>> round(float(feed_forward(FeedForward(one, one), xp.ones((1, 1)))[0, 0]), 6)
    0.841345
    """
    options = {"activation": activation, "arithmetic": arithmetic}
    return _block(expand_and_contract, parameters, x, dropout=dropout, xp=xp, **options)


@with_autocast(position=1)
def gated_feed_forward(
    parameters: GatedFeedForward,
    x: Array,
    /,
    *,
    activation: str = "silu",
    dropout: Dropout | None = None,
    arithmetic: str = "fast",
    xp: Namespace | None = None,
) -> Array:
    r"""Apply an affine map to each position, gated by another, and one back: SwiGLU or GeGLU.

    .. math:: y = \bigl(f(x W_g + b_g) \odot (x W_1 + b_1)\bigr) W_2 + b_2

    Parameters
    ----------
    parameters : GatedFeedForward
        ``gate`` and ``expand`` of shape (C, inner), and ``contract`` of shape (inner, out).
    x : Array, shape (..., C)
        16-bit types are computed in float32 and rounded once.
    activation : {"silu", "gelu", "gelu_tanh", "relu"}
        f: SwiGLU, as in Llama, GeGLU, or ReGLU.
    dropout : Dropout, optional
        Applied to the result.
    arithmetic, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Array, shape (..., out)

    References
    ----------
    N. Shazeer, "GLU variants improve transformer", 2020.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.parameters import GatedFeedForward, Linear
    >>> one, two = Linear(xp.ones((1, 1))), Linear(2 * xp.ones((1, 1)))
    >>> round(float(gated_feed_forward(GatedFeedForward(one, two, one), xp.ones((1, 1)))[0, 0]), 6)
    1.462117
    """
    options = {"activation": activation, "arithmetic": arithmetic}
    return _block(gate_and_contract, parameters, x, dropout=dropout, xp=xp, **options)


def _block(
    body: Callable[..., Array], parameters: Any, x: Array, *, dropout: Dropout | None, xp: Any, **options: Any
) -> Array:
    """The result of a feed-forward block with this body, once its arguments are known to be right."""
    is_gated = body is gate_and_contract
    xp = _check_block(x=x, parameters=parameters, is_gated=is_gated, dropout=dropout, xp=xp, **options)
    dtype, dropout, ops = x.dtype, seeded(dropout, x, xp), ARITHMETICS[options["arithmetic"]]
    parameters, x = upcast((parameters, x), xp=xp)
    y = body(parameters, x, options["activation"], ops, xp=xp)
    return cast_to(ops.drop(y, dropout, xp=xp), dtype, xp=xp)


def feed_and_contract(parameters: FeedForward | GatedFeedForward, x: Array, **options: Any) -> Array:
    """The body of `feed_forward` or of `gated_feed_forward`, by what the parameters are."""
    body: Callable[..., Array] = gate_and_contract if isinstance(parameters, GatedFeedForward) else expand_and_contract
    return body(parameters, x, **options)


def expand_and_contract(parameters: FeedForward, x: Array, activation: str, ops: Any, *, xp: Namespace) -> Array:
    """The body of `feed_forward` before dropout, in the type of the computation."""
    inner = getattr(ops, activation)(ops.affine(x, *parameters.expand, xp=xp), xp=xp)
    return ops.affine(inner, *parameters.contract, xp=xp)


def gate_and_contract(parameters: GatedFeedForward, x: Array, activation: str, ops: Any, *, xp: Namespace) -> Array:
    """The body of `gated_feed_forward` before dropout, in the type of the computation."""
    gate, expand, contract = parameters
    to_gate, to_expand = ops.copies(x, 2, xp=xp)
    gated = getattr(ops, activation)(ops.affine(to_gate, *gate, xp=xp), xp=xp)
    inner = ops.multiply(gated, ops.affine(to_expand, *expand, xp=xp), xp=xp)
    return ops.affine(inner, *contract, xp=xp)


def _activated(name: str, x: Array, arithmetic: str, xp: Namespace | None) -> Array:
    """An activation of an arithmetic, by its name, rounded to the dtype of the argument."""
    xp = check_map(x=x, line="x: ... floating", arithmetic=arithmetic, xp=xp)
    return cast_to(getattr(ARITHMETICS[arithmetic], name)(upcast(x, xp=xp), xp=xp), x.dtype, xp=xp)


@once_per_signature
def _check_block(
    *, x: Array, parameters: Any, is_gated: bool, activation: Any, dropout: Any, arithmetic: Any, xp: Namespace | None
) -> Namespace:
    """Raise unless the arguments of a feed-forward block fit together; return the namespace."""
    check_choice("an activation", activation, ACTIVATIONS)
    check_parameters("feed_forward", parameters, GatedFeedForward if is_gated else FeedForward)
    if dropout is not None:
        check_dropout(dropout)
    arrays = {"feed_forward": parameters, **seed_array(dropout)}
    line = feed_forward_shapes("feed_forward", parameters, "x: floating ... C", "out")
    return check_map(x=x, line=line, arithmetic=arithmetic, xp=xp, **arrays)


def feed_forward_shapes(name: str, parameters: FeedForward | GatedFeedForward, x: str, out: str, like: str = "") -> str:
    """The line of a feed-forward block, of what it takes, or of the letter of its channels, and where it leads to."""
    gate = [linear_shapes(f"{name}.gate", x, "inner", like)] if isinstance(parameters, GatedFeedForward) else []
    expand = linear_shapes(f"{name}.expand", x, "inner", like)
    return ", ".join([*gate, expand, linear_shapes(f"{name}.contract", "inner", out, f"{name}.expand.weight")])
