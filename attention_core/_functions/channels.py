"""Functions of the channels of each position: affine maps, activations, normalizations, and feed-forward blocks."""

from __future__ import annotations

from typing import Any

from .._arithmetic import ACTIVATIONS, ARITHMETICS, check_arithmetic, check_width
from .._arrays import Array, Namespace, cast_to, upcast
from .._backend import common_namespace, with_autocast
from .._checks import check_choice, check_number, check_parameters, check_shapes, linear_shapes, once_per_signature
from ..parameters import FeedForward, GatedFeedForward, LayerNorm, Linear
from ..random import Dropout, check_dropout, seeded
from .options import arrays_of


@with_autocast(position=1, lowers=False)
def layer_norm(
    parameters: LayerNorm, x: Array, /, *, epsilon: float = 1e-5, arithmetic: str = "fast", xp: Namespace | None = None
) -> Array:
    r"""Normalize the channels of each position.

    .. math:: y = \frac{x - \mu}{\sqrt{\operatorname{mean}((x - \mu)^2) + \epsilon}} \cdot \gamma + \beta, \qquad
        \mu = \operatorname{mean}(x)

    Parameters
    ----------
    parameters : LayerNorm
        ``scale`` and ``offset``, each of shape (C,); of the dtype of ``x``.
    x : Array, shape (..., C)
        16-bit types are computed in float32 and rounded once.
    epsilon : float
        Added to the variance, under the root.
    arithmetic, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Array, shape (..., C)

    References
    ----------
    J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer normalization", 2016.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.parameters import LayerNorm
    >>> norm = LayerNorm(scale=xp.ones(2), offset=xp.zeros(2))
    >>> layer_norm(norm, xp.asarray([[1.0, 3.0]]), epsilon=3.0)
    Array([[-0.5,  0.5]], dtype=array_api_strict.float64)
    """
    check_parameters("layer_norm", parameters, LayerNorm)
    xp = check_map(x=x, layer_norm=parameters, line=_LAYER_NORM, epsilon=epsilon, arithmetic=arithmetic, xp=xp)
    return _normalized_once(x, parameters, epsilon, arithmetic, xp)


_RMS_NORM = "scale: C, x: floating ... C like scale"
_LAYER_NORM = "layer_norm.scale: C, x: floating ... C like layer_norm.scale, layer_norm.offset: C like layer_norm.scale"


def norm_shapes(name: str, norm: LayerNorm | Array, letter: str, like: str) -> str:
    """The line of a `LayerNorm`, or of the scale of `rms_norm`, for so many channels."""
    names = [f"{name}.{field}" for field in norm._fields] if isinstance(norm, LayerNorm) else [name]
    return ", ".join(f"{each}: {letter} like {like}" for each in names)


def normalized(x: Array, norm: LayerNorm | Array, *, epsilon: float, ops: Any, xp: Namespace) -> Array:
    """The body of `layer_norm`, or for a scale alone that of `rms_norm`, in the type of the computation."""
    if isinstance(norm, LayerNorm):
        return ops.normalize(x, norm.scale, norm.offset, float(epsilon), xp=xp)
    return ops.normalize_rms(x, norm, float(epsilon), xp=xp)


def _normalized_once(x: Array, norm: LayerNorm | Array, epsilon: float, arithmetic: str, xp: Namespace) -> Array:
    x, dtype, ops = upcast(x, xp=xp), x.dtype, ARITHMETICS[arithmetic]
    return cast_to(normalized(x, upcast(norm, xp=xp), epsilon=epsilon, ops=ops, xp=xp), dtype, xp=xp)


@once_per_signature
def check_map(*, x: Array, line: str, arithmetic: Any, xp: Any, epsilon: Any = ..., **parameters: Any) -> Namespace:
    """Raise unless parameters, and an input that an arithmetic supports, have the shapes of a line."""
    xp = common_namespace(xp, {"x": x, **parameters})
    check_arithmetic(arithmetic, "x", x)
    known = check_shapes(line, {"x": x, **parameters})
    if parameters:  # an activation adds nothing up
        check_width(arithmetic, "x", x)
    if epsilon is not ...:  # of a normalization
        check_number("epsilon", epsilon, positive=True)
        check_channels("x", known["C"])
    return xp


def check_channels(name: str, channels: int | None) -> None:
    """Raise unless there is a channel to normalize."""
    if channels == 0:
        raise ValueError(f"expected {name} with at least one channel; got none")


@with_autocast(position=1, lowers=False)
def rms_norm(
    scale: Array, x: Array, /, *, epsilon: float = 1e-6, arithmetic: str = "fast", xp: Namespace | None = None
) -> Array:
    r"""Divide the channels of each position by the root of their mean square.

    .. math:: y = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot \gamma

    Over the channels of query and key heads, it bounds the scores of attention (query-key normalization).

    Parameters
    ----------
    scale : Array, shape (C,)
        :math:`\gamma`, of the dtype of ``x``.
    x : Array, shape (..., C)
        16-bit types are computed in float32 and rounded once. Squares that overflow do no harm.
    epsilon : float
        Added to the mean square, under the root.
    arithmetic, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Array, shape (..., C)
        Of the dtype of ``x``.

    References
    ----------
    B. Zhang, R. Sennrich, "Root mean square layer normalization", 2019. A. Henry et al., "Query-key normalization for
    transformers", 2020.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> rms_norm(xp.ones(2), xp.asarray([[1.0, 7.0]]), epsilon=1e-9)
    Array([[0.2, 1.4]], dtype=array_api_strict.float64)
    """
    xp = check_map(x=x, scale=scale, line=_RMS_NORM, epsilon=epsilon, arithmetic=arithmetic, xp=xp)
    return _normalized_once(x, scale, epsilon, arithmetic, xp)


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
