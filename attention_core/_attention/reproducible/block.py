"""The scores of one block in reproducible arithmetic."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attention_core._arithmetic.elementary import tanh
from attention_core._arithmetic.exact import to_float64, uncontracted
from attention_core._arrays import Array, Namespace
from attention_core._attention.blocks.grid import Grid, Sample, may_mask
from attention_core._attention.blocks.scores import block_context
from attention_core._attention.reproducible.slices import SCORE_UNIT, packed_matmul
from attention_core.masks import Positions


class ExactScoreBlock(NamedTuple):
    """A block of queries against a block of keys."""

    scores: Array  # in units of 256 ln 2, (G, R, m, n); -inf where not allowed
    softcap_derivative: Array | None
    at: Positions | None


def exact_score_block(
    grid: Grid, sample: Sample, query: Array, key: Array, *, i: Any, j: Any, masked: bool
) -> ExactScoreBlock:
    """The scores of packed queries and keys: product, softcap, bias and mask.

    Masked scores are replaced by -inf; a bias that is -inf masks, too. There is no score modification in reproducible
    arithmetic.
    """
    plan, xp = grid.plan, grid.xp
    scores = packed_matmul(grid, query, key, "scores")
    at, bias, allowed = block_context(grid, sample, scores, i, j=j, masked=masked)
    derivative = None
    if plan.softcap is not None:
        scores, derivative = _soften(scores, plan.softcap, xp)
    if bias is not None:
        scores = xp.add(scores, uncontracted(xp.multiply(to_float64(bias, xp), SCORE_UNIT), xp))
    scores = scores if allowed is None else xp.where(allowed, scores, -math.inf)
    if derivative is not None and may_mask(grid):  # that of a masked key may be nan
        derivative = xp.where(xp.equal(scores, -math.inf), 0.0, derivative)
    return ExactScoreBlock(scores, derivative, at)


def _soften(scores: Array, softcap: float, xp: Namespace) -> tuple[Array, Array]:
    r"""Scores after the cap, :math:`c \tanh(s / c)`, in units of 256 ln 2, and their derivative by s."""
    ratio = tanh(uncontracted(xp.multiply(scores, 1 / softcap), xp), xp)
    derivative = xp.subtract(1.0, uncontracted(xp.multiply(ratio, ratio), xp))
    return uncontracted(xp.multiply(ratio, softcap * SCORE_UNIT), xp), derivative
