"""Layer normalization and RMS normalization."""

from __future__ import annotations

from typing import Any

from attention_core._arithmetic import ARITHMETICS, check_input
from attention_core._arrays import Array, Namespace, cast_to, shape_text, sizes, upcast
from attention_core._backend import common_namespace, with_autocast
from attention_core._checks import (
    check_channels,
    check_like,
    check_number,
    check_parameters,
    check_vector,
    once_per_signature,
)
from attention_core.parameters import LayerNorm


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
    xp = _check_layer_norm_call(x=x, parameters=parameters, epsilon=epsilon, arithmetic=arithmetic, xp=xp)
    dtype = x.dtype
    (scale, offset), x = upcast((parameters, x), xp=xp)
    return cast_to(ARITHMETICS[arithmetic].normalize(x, scale, offset, float(epsilon), xp=xp), dtype, xp=xp)


def check_layer_norm(name: str, parameters: LayerNorm, x_name: str, x: Array) -> None:
    """Raise unless a `LayerNorm` fits the channels, dtype and device of its input."""
    check_parameters(name, parameters, LayerNorm)
    check_norm(name, parameters, _checked_channels(x_name, x), x_name, x)


def check_norm(name: str, norm: LayerNorm | Array, channels: int | None, x_name: str, x: Array) -> None:
    """Raise unless a `LayerNorm`, or the scale of `rms_norm`, fits channels, and the dtype and device of an array."""
    fields = norm._asdict() if isinstance(norm, LayerNorm) else {"": norm}
    for field, vector in fields.items():
        check_vector(f"{name}.{field}" if field else name, vector, channels, x_name, model=x)


def normalized(x: Array, norm: LayerNorm | Array, *, epsilon: float, ops: Any, xp: Namespace) -> Array:
    """The body of `layer_norm`, or for a scale alone that of `rms_norm`, in the type of the computation."""
    if isinstance(norm, LayerNorm):
        return ops.normalize(x, norm.scale, norm.offset, float(epsilon), xp=xp)
    return ops.normalize_rms(x, norm, float(epsilon), xp=xp)


@once_per_signature
def _check_layer_norm_call(
    *, x: Array, parameters: LayerNorm, epsilon: Any, arithmetic: Any, xp: Namespace | None
) -> Namespace:
    check_parameters("layer_norm", parameters, LayerNorm)
    xp = common_namespace(xp, {"x": x, "layer_norm": parameters})
    check_input("x", x, 1, "(..., C)", arithmetic=arithmetic)
    check_number("epsilon", epsilon, positive=True)
    _check_taken("x", x, "layer_norm.scale", parameters.scale)
    check_layer_norm("layer_norm", parameters, "x", x)
    return xp


@once_per_signature
def _check_rms_norm(*, x: Array, scale: Array, epsilon: Any, arithmetic: Any, xp: Namespace | None) -> Namespace:
    xp = common_namespace(xp, {"x": x, "scale": scale})
    check_input("x", x, 1, "(..., C)", arithmetic=arithmetic)
    check_number("epsilon", epsilon, positive=True)
    _check_taken("x", x, "scale", scale)
    check_vector("scale", scale, _checked_channels("x", x), "x", model=x)
    return xp


def _checked_channels(name: str, x: Array) -> int | None:
    """The number of channels, of which there has to be one."""
    if sizes(x)[-1] == 0:
        raise ValueError(f"expected {name} with at least one channel; got {shape_text(x)}")
    return sizes(x)[-1]


def _check_taken(name: str, x: Array, scale_name: str, scale: Array) -> None:
    """Raise unless an input has the dtype, the device and the channels of a scale, which is a vector."""
    if len(getattr(scale, "shape", ())) == 1 and sizes(x)[-1] != 0:
        check_like(name, x, scale_name, scale)
        check_channels(name, x, scale_name, scale)


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
    xp = _check_rms_norm(x=x, scale=scale, epsilon=epsilon, arithmetic=arithmetic, xp=xp)
    dtype = x.dtype
    scale, x = upcast((scale, x), xp=xp)
    return cast_to(ARITHMETICS[arithmetic].normalize_rms(x, scale, float(epsilon), xp=xp), dtype, xp=xp)
