"""The weighted average of attention: a softmax over the keys that a query may attend to, and the mean of the values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attention_core._arrays import Array, Namespace, length, on_device_of, scalar_like, shape
from attention_core._attention.nonfinite import infinities, nonfinite_indicators


def softmax(
    scores: Array,
    allowed: Array | None,
    /,
    *,
    constant: Callable[[Array], Array] | None = None,
    exp_difference: Callable[[Array, Array], Array] | None = None,
    logsumexp: bool = True,
    xp: Namespace,
) -> tuple[Array, Array, Array | None]:
    r"""Exponentials of the scores (..., M, N), their total (..., M, 1), and logsumexp (..., M, 1) if that is asked for.

    .. math:: e_{ij} = \exp(s_{ij} - t_i), \qquad z_i = \sum_j e_{ij}, \qquad \ell_i = t_i + \log z_i,
        \qquad t_i = \max_j s_{ij}

    The weights are :math:`p_{ij} = e_{ij} / z_i`; dividing the sum of values instead rounds once, and keeps equal keys
    exact. They and :math:`\ell_i` do not depend on :math:`t_i`, so derivatives take it as a constant. A fully masked
    row has :math:`e_{ij} = 0`, :math:`z_i = 1` and :math:`\ell_i = -\infty`, with gradients exactly 0. ``allowed``
    decides which rows these are, never the scores, which are -inf where not allowed; it is ``None`` for everywhere.

    ``constant`` is the backend's `stop_gradient`, for libraries that differentiate. ``exp_difference(x, y)`` returns
    ``exp(x - y)``, perhaps in the memory of the scores.
    """
    num_keys = length(scores, -1, xp=xp)
    if isinstance(num_keys, int) and num_keys == 0:
        one = xp.ones((*shape(scores, xp=xp)[:-1], 1), dtype=scores.dtype, **on_device_of(scores))
        return scores, one, xp.multiply(one, -math.inf)
    top = xp.max(scores, axis=-1, keepdims=True)
    top = top if constant is None else constant(top)
    if allowed is None:
        exponentials = xp.exp(xp.subtract(scores, top)) if exp_difference is None else exp_difference(scores, top)
        total = _sum_exponentials(exponentials, num_keys, xp)
        return exponentials, total, xp.add(top, xp.log(total)) if logsumexp else None
    empty = xp.logical_not(xp.any(allowed, axis=-1, keepdims=True))
    top = xp.where(empty, 0.0, top)  # -inf - -inf would be nan
    exponentials = xp.exp(xp.subtract(scores, top)) if exp_difference is None else exp_difference(scores, top)
    total = xp.where(empty, 1.0, _sum_exponentials(exponentials, num_keys, xp))  # 0 / 0 and log(0)
    return exponentials, total, xp.where(empty, -math.inf, xp.add(top, xp.log(total))) if logsumexp else None


def _sum_exponentials(exponentials: Array, num_keys: Any, xp: Namespace) -> Array:
    total = xp.sum(exponentials, axis=-1, keepdims=True)
    if isinstance(num_keys, int):
        return total
    return xp.where(xp.equal(total, 0.0), 1.0, total)  # there may turn out to be no keys


def weighted_sum(
    weights: Array,
    value: Array,
    allowed: Array | None,
    /,
    *,
    cond: Callable[[Array, Callable[[], Array], Callable[[], Array]], Array] | None = None,
    xp: Namespace,
) -> Array:
    r"""The weighted sum of values (..., N, E), :math:`o_i = \sum_j e_{ij} v_j`, over the keys that are allowed.

    With a mask, :math:`0 \cdot \infty` must not arise where a value is masked, so only finite values are averaged.
    Two sums of indicators then show which outputs attended to inf or NaN, and which to -inf or NaN. Such an output is
    inf or -inf, or NaN for both. The infinity is multiplied by the total weight, so that no gradient of it is finite.

    ``allowed`` is ``None`` when nothing is masked: then the plain product does. ``cond(condition, then, otherwise)``
    runs one of two functions. It leaves out the product with the indicators where all values are finite.
    """
    if allowed is None:
        return xp.matmul(weights, value)

    def with_infinities() -> Array:
        summed = xp.matmul(weights, xp.where(xp.isfinite(value), value, 0.0))
        indicators = xp.concat(list(nonfinite_indicators(value, xp)), axis=-1)
        attended = xp.greater(xp.matmul(weights, indicators), 0.0)  # (..., M, 2 E)
        width = shape(value, xp=xp)[-1]
        attended_inf, attended_minus_inf = attended[..., :width], attended[..., width:]
        added = infinities(attended_inf, attended_minus_inf, value, xp)
        return xp.add(summed, xp.multiply(added, xp.sum(weights, axis=-1, keepdims=True)))

    if cond is None:
        return with_infinities()
    return cond(xp.isfinite(xp.sum(value)), lambda: xp.matmul(weights, value), with_infinities)


def finite_vectors(x: Array, /, *, xp: Namespace) -> tuple[Array, Array]:
    """The finite part of vectors (..., D), and (...) of 0 or nan: added to scores, it stands for what was removed."""
    finite = xp.isfinite(x)
    rest = xp.where(xp.all(finite, axis=-1), scalar_like(0.0, x, xp), math.nan)
    return xp.where(finite, x, 0.0), rest


def logaddexp(first: Array, second: Array, /, *, xp: Namespace) -> Array:
    r"""The logarithm of a sum of exponentials, :math:`\log(e^a + e^b)`; of two -inf it is -inf, with gradients 0."""
    top = xp.maximum(first, second)
    none = xp.equal(top, -math.inf)
    top = xp.where(none, 0.0, top)
    total = xp.add(xp.exp(xp.subtract(first, top)), xp.exp(xp.subtract(second, top)))
    return xp.where(none, -math.inf, xp.add(top, xp.log(xp.where(none, 1.0, total))))
