r"""The scores of attention after the product: cap, modification, bias and mask, for all scores or for one block.

.. math:: s_{ij} = f\!\left(c \tanh\frac{r_{ij}}{c}\right) + b_{ij}, \qquad r_{ij} = (\sigma q_i) \cdot k_j,

and :math:`s_{ij} = -\infty` where query i may not attend to key j.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .._arrays import Array, Namespace, number_like
from .._checks import check_like_array, result_of
from ..masks import Mask, Positions


def modify_scores(
    scores: Array,
    softcap: float | Array | None,
    score_mod: Callable[..., Array] | None,
    at: Positions | None,
    allowed: Array | None = None,
    *,
    xp: Namespace,
) -> Array:
    r"""Scores after the cap, :math:`c \tanh(s / c)`, and after a function of score and positions.

    What is not allowed becomes 0 first: an infinity there would reach their gradients.
    """
    scores = scores if allowed is None else xp.where(allowed, scores, 0.0)
    if softcap is not None:
        softcap = number_like(softcap, scores, xp)
        scores = xp.multiply(xp.tanh(xp.divide(scores, softcap)), softcap)
    if score_mod is None:
        return scores
    new = result_of("score_mod", score_mod, scores, *at)  # type: ignore[misc]
    check_like_array("the result of score_mod", new, "its scores", scores)
    return xp.add(new, 0.0)  # a copy, over which exponentials may be written


def allowed_by(mask: Mask | Array | None, bias: Array | None, at: Positions | None, xp: Namespace) -> Array | None:
    """Where attention is allowed: by the mask, and by a bias that is not -inf; ``None`` for everywhere."""
    if isinstance(mask, Mask):
        assert at is not None
        mask = mask.allowed(at, xp=xp)
    elif mask is not None and not len(mask.shape):
        mask = xp.reshape(mask, (1,))
    if bias is None:
        return mask
    admitted = xp.not_equal(bias if len(bias.shape) else xp.reshape(bias, (1,)), -math.inf)
    return admitted if mask is None else xp.logical_and(mask, admitted)
