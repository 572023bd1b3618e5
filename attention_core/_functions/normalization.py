"""Layer normalization and RMS normalization."""

from __future__ import annotations

from typing import Any

from .._arithmetic import ARITHMETICS, check_arithmetic, check_width
from .._arrays import Array, Namespace, cast_to, upcast
from .._backend import common_namespace, with_autocast
from .._checks import check_number, check_parameters, check_shapes, once_per_signature
from ..parameters import LayerNorm


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
