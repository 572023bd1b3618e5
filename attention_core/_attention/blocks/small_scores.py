"""How small scores are: whether blocks can take exponentials as they are, without a maximum."""

from __future__ import annotations

import functools

from attention_core._arrays import Array, Namespace
from attention_core._backend import Backend

MAX_PLAIN_SCORE = 32.0  # below this, exponentials of scores can be taken as they are
NORM_LIMIT = 1e15  # of norms, and of values


def _below_norm_limit(*magnitudes: Array, xp: Namespace) -> Array:
    return functools.reduce(xp.logical_and, (xp.less(xp.max(magnitude), NORM_LIMIT) for magnitude in magnitudes))


def scores_are_small(query: Array, key: Array, value: Array, backend: Backend) -> Array:
    r"""Whether exponentials of scores can be taken as they are, and averaged by.

    .. math:: |q_i \cdot k_j| \le \max_i \|q_i\| \, \max_j \|k_j\| \le 32

    in each head keeps exponentials between 1e-14 and 1e14, and products with values between 1e-15 and 1e15, or 0, are
    far from both ends of float32.
    """
    xp, loops = backend.namespace, backend.loops
    norms = xp.max(loops.norm(query), axis=(2, 3)), xp.max(loops.norm(key), axis=2)
    bounds = xp.multiply(*(xp.minimum(norm, NORM_LIMIT) for norm in norms))  # inf * 0 would be nan
    magnitudes = xp.abs(value)
    fit = xp.logical_and(_below_norm_limit(*norms, magnitudes, xp=xp), xp.all(xp.less(bounds, MAX_PLAIN_SCORE)))

    def all_but_zeros() -> Array:
        return xp.logical_and(
            fit, xp.greater(xp.min(xp.where(xp.equal(magnitudes, 0.0), 1.0, magnitudes)), 1 / NORM_LIMIT)
        )

    return loops.cond(xp.greater(xp.min(magnitudes), 1 / NORM_LIMIT), lambda: fit, all_but_zeros)
