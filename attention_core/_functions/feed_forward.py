"""Affine maps, activations, and the feed-forward blocks of a transformer."""

from __future__ import annotations

from typing import Any

from .._arithmetic import ACTIVATIONS, ARITHMETICS
from .._arrays import Array, Namespace, cast_to, upcast
from .._backend import with_autocast
from .._checks import check_choice, check_parameters, linear_shapes, once_per_signature
from ..parameters import FeedForward, GatedFeedForward, Linear
from ..random import Dropout, check_dropout, seeded
from .normalization import check_map
from .options import arrays_of


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
    parameters: FeedForward | GatedFeedForward,
    x: Array,
    /,
    *,
    activation: str | None = None,
    dropout: Dropout | None = None,
    arithmetic: str = "fast",
    xp: Namespace | None = None,
) -> Array:
    r"""Apply two affine maps to each position, with an activation in between, or a gate: SwiGLU or GeGLU.

    .. math::

        y = f(x W_1 + b_1)\, W_2 + b_2, \qquad
        \text{gated:}\quad y = \bigl(f(x W_g + b_g) \odot (x W_1 + b_1)\bigr) W_2 + b_2

    Parameters
    ----------
    parameters : FeedForward or GatedFeedForward
        ``expand``, and ``gate`` if there is one, of shape (C, inner), and ``contract`` of shape (inner, out).
    x : Array, shape (..., C)
        16-bit types are computed in float32 and rounded once.
    activation : {"gelu", "gelu_tanh", "relu", "silu"}, optional
        f; by default the GELU, which is exact, without tanh, and with a gate the SiLU, as in Llama.
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
    >>> from attention_core.parameters import FeedForward, GatedFeedForward, Linear
    >>> one, two = Linear(xp.ones((1, 1))), Linear(2 * xp.ones((1, 1)))
    >>> round(float(feed_forward(FeedForward(one, one), xp.ones((1, 1)))[0, 0]), 6)
    0.841345
    >>> round(float(feed_forward(GatedFeedForward(one, two, one), xp.ones((1, 1)))[0, 0]), 6)
    1.462117
    """
    if activation is None:
        activation = "silu" if isinstance(parameters, GatedFeedForward) else "gelu"
    options = {"activation": activation, "arithmetic": arithmetic}
    xp = _check_call(x=x, parameters=parameters, dropout=dropout, xp=xp, **options)
    dtype, dropout, ops = x.dtype, seeded(dropout, x, xp), ARITHMETICS[arithmetic]
    parameters, x = upcast((parameters, x), xp=xp)
    y = feed_and_contract(parameters, x, activation, ops, xp=xp)
    return cast_to(ops.drop(y, dropout, xp=xp), dtype, xp=xp)


def feed_and_contract(
    parameters: FeedForward | GatedFeedForward, x: Array, activation: str, ops: Any, *, xp: Namespace
) -> Array:
    """The body of `feed_forward` before dropout, in the type of the computation."""
    function, expand = getattr(ops, activation), parameters.expand
    if isinstance(parameters, GatedFeedForward):
        to_gate, to_expand = ops.copies(x, 2, xp=xp)
        gated = function(ops.affine(to_gate, *parameters.gate, xp=xp), xp=xp)
        inner = ops.multiply(gated, ops.affine(to_expand, *expand, xp=xp), xp=xp)
    else:
        inner = function(ops.affine(x, *expand, xp=xp), xp=xp)
    return ops.affine(inner, *parameters.contract, xp=xp)


def _activated(name: str, x: Array, arithmetic: str, xp: Namespace | None) -> Array:
    """An activation of an arithmetic, by its name, rounded to the dtype of the argument."""
    xp = check_map(x=x, line="x: ... floating", arithmetic=arithmetic, xp=xp)
    return cast_to(getattr(ARITHMETICS[arithmetic], name)(upcast(x, xp=xp), xp=xp), x.dtype, xp=xp)


@once_per_signature
def _check_call(
    *, x: Array, parameters: Any, activation: Any, dropout: Any, arithmetic: Any, xp: Namespace | None
) -> Namespace:
    """Raise unless the arguments of a feed-forward block fit together; return the namespace."""
    check_choice("an activation", activation, ACTIVATIONS)
    check_parameters("feed_forward", parameters, FeedForward, GatedFeedForward)
    if dropout is not None:
        check_dropout(dropout)
    arrays = {"feed_forward": parameters, **arrays_of({"dropout": dropout})}
    line = feed_forward_shapes("feed_forward", parameters, "x: floating ... C", "out")
    return check_map(x=x, line=line, arithmetic=arithmetic, xp=xp, **arrays)


def feed_forward_shapes(name: str, parameters: FeedForward | GatedFeedForward, x: str, out: str, like: str = "") -> str:
    """The line of a feed-forward block, of what it takes, or of the letter of its channels, and where it leads to."""
    gate = [linear_shapes(f"{name}.gate", x, "inner", like)] if isinstance(parameters, GatedFeedForward) else []
    expand = linear_shapes(f"{name}.expand", x, "inner", like)
    return ", ".join([*gate, expand, linear_shapes(f"{name}.contract", "inner", out, f"{name}.expand.weight")])
