"""Misbehaviour that is known, and left out of what the fuzzer draws or compares.

Each has a name, and a function that shows it. A test requires that it still does: whoever mends one removes it here,
and with it the exclusion that names it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import attention_core as ac

KNOWN: dict[str, Callable[[], bool]] = {}
"""What shows a misbehaviour, by its name: a function that returns whether it is still there."""


def known(name: str) -> Callable[[Callable[[], bool]], str]:
    """Enter a function that shows a misbehaviour; it becomes its name."""

    def enter(shows: Callable[[], bool]) -> str:
        KNOWN[name] = shows
        return name

    return enter


@known("reproducible arithmetic of 16 bits loses weights that are far below the largest")
def SMALL_WEIGHTS() -> bool:  # noqa: N802 (a name of a constant)
    query, key = np.ones((1, 1, 1), np.float16), np.asarray([[[0.0], [-15.0]]], np.float16)
    value = np.asarray([[[0.0], [1000.0]]], np.float16)
    output = ac.scaled_dot_product_attention(query, key, value, scale=1.0, arithmetic="reproducible")
    return abs(float(output[0, 0, 0]) / 3.0590222e-4 - 1) > 1e-3


@known("in reproducible arithmetic of 16 bits, a large masked value takes digits of small values")
def LARGE_MASKED_VALUES() -> bool:  # noqa: N802
    x, value = np.zeros((1, 2, 1), np.float16), np.asarray([[[1e-4], [12.0]]], np.float16)
    return not ac.scaled_dot_product_attention(x, x, value, is_causal=True, arithmetic="reproducible")[0, 0, 0]


@known("reproducible arithmetic loses scores of large channels times small ones")
def MIXED_CHANNELS() -> bool:  # noqa: N802
    query, key = np.asarray([[[8192, 2**-13]]], np.float16), np.asarray([[[3 * 2**-13, 3 * 8192]]], np.float16)
    scores = ac.attention_scores(query, key, scale=0.5, arithmetic="reproducible")
    return float(scores[0, 0, 0]) != 3
