"""Self-attention over feature maps, as in SAGAN, and spectral normalization of its kernels."""

from __future__ import annotations

from typing import Any

from .._arithmetic import ARITHMETICS, check_arithmetic
from .._arrays import Array, Namespace, cast_to, move_axis, shape, shape_text, sizes, upcast
from .._attention.call import Attention
from .._backend import common_namespace, with_autocast
from .._checks import (
    check_choice,
    check_flags,
    check_number,
    check_parameters,
    check_positive,
    check_shapes,
    linear_shapes,
)
from ..parameters import SaganAttention
from .attention import scaled_dot_product_attention

MAX_ITERATIONS = 1000  # far beyond convergence: each is part of a traced program


@with_autocast(position=1, lowers=False)
def sagan_attention(
    parameters: SaganAttention,
    x: Array,
    /,
    *,
    pool: bool = True,
    data_format: str = "channels_last",
    return_weights: bool = False,
    arithmetic: str = "fast",
    xp: Namespace | None = None,
) -> Any:
    r"""Add self-attention over a feature map: each position attends to all positions, or to their 2 × 2 maxima.

    .. math::

        y = x + \sigma\, \bigl(\operatorname{softmax}(\theta(x)\, \phi(x)^\top)\, g(x)\bigr) W^O

    The scores are not scaled. With pooling, :math:`\phi` and :math:`g` are reduced to the maxima of 2 × 2 positions.

    Parameters
    ----------
    parameters : SaganAttention
        1 × 1 convolutions as `Linear`: ``theta`` and ``phi`` (C, D), ``g`` (C, E), and ``output`` (E, C), or ``None``
        with E = C. ``sigma`` of shape (1,) or ().
    x : Array, shape (..., height, width, C)
        Or (..., C, height, width) with ``channels_first``. 16-bit types are computed in float32 and rounded once.
    pool : bool
        Whether to pool. The last row of an odd height, and the last column of an odd width, are then no keys.
    data_format : {"channels_last", "channels_first"}
    return_weights : bool
        Whether to return the weights as well, of shape (..., 1, height * width, keys).
    arithmetic, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Array
        Of the shape of ``x``; or ``Attention(output, weights, None)`` with ``return_weights``.

    Raises
    ------
    TypeError, ValueError
        When dtypes or shapes do not fit, the result would not have C channels, or the data format is unknown.

    References
    ----------
    H. Zhang, I. Goodfellow, D. Metaxas, A. Odena, "Self-attention generative adversarial networks", 2018.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.parameters import Linear, SaganAttention
    >>> same = Linear(xp.ones((1, 1)))
    >>> x = xp.ones((2, 4, 1))
    >>> sagan_attention(SaganAttention(same, same, same, None, xp.asarray(0.5)), x)[0, :, 0]
    Array([1.5, 1.5, 1.5, 1.5], dtype=array_api_strict.float64)
    """
    check_parameters("parameters", parameters, SaganAttention)
    xp = common_namespace(xp, {"x": x, "parameters": parameters})
    check_flags(pool=pool, return_weights=return_weights)
    _check_sagan(parameters, x, pool=pool, data_format=data_format, arithmetic=arithmetic)
    dtype = x.dtype
    parameters, x = upcast((parameters, x), xp=xp)
    maps = ARITHMETICS[arithmetic]
    x, attended = maps.copies(x, 2, xp=xp)
    places = move_axis(attended, -3, -1, xp) if data_format == "channels_first" else attended
    theta, phi, g = (
        maps.affine(each, *convolution, xp=xp)
        for each, convolution in zip(maps.copies(places, 3, xp=xp), parameters[:3], strict=True)
    )
    if pool:
        phi, g = _max_pool(phi, maps, xp), _max_pool(g, maps, xp)
    query, key, value = (_flatten_places(array, xp) for array in (theta, phi, g))  # (..., 1, positions, channels)
    found = scaled_dot_product_attention(
        query, key, value, scale=1.0, return_weights=return_weights, arithmetic=arithmetic, xp=xp
    )
    output = found.output if return_weights else found
    y = output if parameters.output is None else maps.affine(output, *parameters.output, xp=xp)
    y = xp.reshape(y, shape(places, xp=xp))
    y = move_axis(y, -1, -3, xp) if data_format == "channels_first" else y
    result = cast_to(maps.blend(x, y, xp.reshape(parameters.sigma, ()), xp=xp), dtype, xp=xp)
    return Attention(result, cast_to(found.weights, dtype, xp=xp)) if return_weights else result


@with_autocast(lowers=False)
def spectral_norm(
    weight: Array,
    u: Array,
    /,
    *,
    iterations: int = 1,
    epsilon: float = 1e-12,
    arithmetic: str = "fast",
    xp: Namespace | None = None,
) -> tuple[Array, Array]:
    r"""Divide a weight by its largest singular value, as power iteration estimates it.

    .. math::

        v \leftarrow \frac{W u}{\lVert W u \rVert + \epsilon}, \qquad
        u \leftarrow \frac{W^\top v}{\lVert W^\top v \rVert + \epsilon}, \qquad \sigma = v^\top W u

    The gradient flows through every step, as in the code of the authors of SAGAN.

    Parameters
    ----------
    weight : Array, shape (..., out)
        All axes but the last are flattened.
    u : Array, shape (out,)
        The current estimate of the right singular vector; at first random. It keeps a floating-point dtype of its own,
        as weights are cast for a call, and what is kept between calls is not.
    iterations : int
        Steps of power iteration, 1 to 1000.
    epsilon : float
        Added to the norms.
    arithmetic, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    normalized : Array, shape (..., out)
        :math:`W / \sigma`.
    u : Array, shape (out,)
        The new estimate, for the next call.

    References
    ----------
    T. Miyato, T. Kataoka, M. Koyama, Y. Yoshida, "Spectral normalization for generative adversarial networks", 2018.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> normalized, _ = spectral_norm(xp.asarray([[2.0, 0.0], [0.0, 1.0]]), xp.asarray([1.0, 0.0]))
    >>> normalized
    Array([[1. , 0. ],
           [0. , 0.5]], dtype=array_api_strict.float64)
    """
    xp = common_namespace(xp, {"weight": weight, "u": u})
    check_arithmetic(arithmetic, "weight", weight)
    check_shapes("weight: floating ... in out, u: floating out on weight", {"weight": weight, "u": u})
    if 0 in sizes(weight):
        raise ValueError(f"expected weight with at least one element; got {shape_text(weight)}")
    iterations = check_positive("iterations", iterations, most=MAX_ITERATIONS)
    check_number("epsilon", epsilon, positive=True)
    dtype, dtype_of_u, epsilon = weight.dtype, u.dtype, float(epsilon)
    weight = upcast(weight, xp=xp)
    u = cast_to(u, weight.dtype, xp=xp)
    maps = ARITHMETICS[arithmetic]
    weight, matrix = maps.copies(weight, 2, xp=xp)
    matrices = iter(maps.copies(xp.reshape(matrix, (-1, shape(weight, xp=xp)[-1])), 2 * iterations + 1, xp=xp))
    row = xp.reshape(u, (1, -1))
    for _ in range(iterations):
        v = maps.unit_vector(maps.affine(row, xp.matrix_transpose(next(matrices)), None, xp=xp), epsilon, xp=xp)
        v, last = maps.copies(v, 2, xp=xp)
        row = maps.unit_vector(maps.affine(v, next(matrices), None, xp=xp), epsilon, xp=xp)
    row, kept = maps.copies(row, 2, xp=xp)
    sigma = maps.affine(maps.affine(last, next(matrices), None, xp=xp), xp.matrix_transpose(row), None, xp=xp)
    normalized = maps.divide(weight, xp.reshape(sigma, ()), xp=xp)
    return cast_to(normalized, dtype, xp=xp), cast_to(xp.reshape(kept, (-1,)), dtype_of_u, xp=xp)


def _max_pool(maps: Array, arithmetic: Any, xp: Namespace) -> Array:
    """Maxima of 2 × 2 positions: (..., height, width, C) -> (..., height // 2, width // 2, C)."""
    *leading, height, width, channels = shape(maps, xp=xp)
    apart = xp.reshape(
        maps[..., : height // 2 * 2, : width // 2 * 2, :], (*leading, height // 2, 2, width // 2, 2, channels)
    )
    *axes, top, side, left, low, last = range(len(apart.shape))
    squares = xp.permute_dims(apart, (*axes, top, left, side, low, last))
    return arithmetic.max_pool(xp.reshape(squares, (*leading, height // 2, width // 2, 4, channels)), xp=xp)


def _flatten_places(maps: Array, xp: Namespace) -> Array:
    """Flatten a feature map to a sequence, for one head: (..., height, width, C) -> (..., 1, height * width, C)."""
    *leading, height, width, channels = shape(maps, xp=xp)
    return xp.reshape(maps, (*leading, 1, height * width, channels))


def check_data_format(data_format: Any) -> None:
    """Raise unless this is a data format."""
    check_choice("data_format", data_format, _LAYOUTS)


def _check_sagan(parameters: SaganAttention, x: Array, *, pool: bool, data_format: str, arithmetic: Any) -> None:
    check_data_format(data_format)
    check_arithmetic(arithmetic, "x", x)
    layout, other, axis = _LAYOUTS[data_format]

    def hint(name: str, array: Array, known: dict[str, Any]) -> str:
        has_them = name == "x" and sizes(array)[axis] == known["C"]
        return f": it has them with data_format={other!r}" if has_them else ""

    ends = {"theta": "D", "phi": "D", "g": "C" if parameters.output is None else "E"}
    lines = [linear_shapes(name, "C", end, "theta.weight") for name, end in ends.items()]
    lines.insert(1, f"x: floating ... {layout} like theta.weight")
    lines += [] if parameters.output is None else [linear_shapes("output", "E", "C", "theta.weight")]
    lines.append(f"sigma: {'one' if len(getattr(parameters.sigma, 'shape', ())) else ''} like theta.weight")
    known = check_shapes(", ".join(lines), {"x": x, **parameters._asdict()}, {"one": 1}, hint)
    if pool and 1 in (known["height"], known["width"]):
        raise ValueError(f"expected two rows and columns of x ({data_format}), or pool=False; got {shape_text(x)}")


_LAYOUTS = {  # of a data format; the other one, and where that has channels
    "channels_last": ("height width C", "channels_first", -3),
    "channels_first": ("C height width", "channels_last", -1),
}
