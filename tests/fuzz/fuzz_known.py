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


@known("reproducible arithmetic loses weights that are small beside the largest")
def SMALL_WEIGHTS() -> bool:  # noqa: N802 (a name of a constant)
    query, key = np.ones((1, 1, 1), np.float32), np.asarray([[[0.0], [-20.0]]], np.float32)
    value = np.asarray([[[0.0], [1.0]]], np.float32)
    output = ac.scaled_dot_product_attention(query, key, value, scale=1.0, arithmetic="reproducible")
    return abs(float(output[0, 0, 0]) / 2.0611536e-9 - 1) > 1e-5


@known("a sink of -inf gives nan to a query that may attend to nothing")
def SINK_OF_NO_WEIGHT() -> bool:  # noqa: N802
    x, sinks = np.ones((1, 1, 1)), np.asarray([-np.inf])
    return bool(np.isnan(ac.scaled_dot_product_attention(x, x, x, mask=np.asarray([False]), sinks=sinks)).any())


@known("reproducible arithmetic loses scores of large channels times small ones")
def MIXED_CHANNELS() -> bool:  # noqa: N802
    query, key = np.asarray([[[8192, 2**-13]]], np.float16), np.asarray([[[3 * 2**-13, 3 * 8192]]], np.float16)
    scores = ac.attention_scores(query, key, scale=0.5, arithmetic="reproducible")
    return float(scores[0, 0, 0]) != 3
