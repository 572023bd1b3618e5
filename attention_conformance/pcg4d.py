"""The hash pcg4d, in Python's integers, and the pattern of kept weights that dropout draws from it.

The hash is that of Jarzynski and Olano, "Hash functions for GPU rendering" (JCGT, 2020).
"""

from __future__ import annotations

import numpy as np

from attention_conformance.problem import NumpyArray, Seed

__all__ = ["keep_pattern", "pcg4d"]

WORD = 2**32


def pcg4d(words: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Hash four words of 32 bits into four."""
    a, b, c, d = (1664525 * word + 1013904223 for word in words)
    for final in (False, True):
        a = (a + b * d) % WORD
        b = (b + c * a) % WORD
        c = (c + a * b) % WORD
        d = (d + b * c) % WORD
        if not final:
            a, b, c, d = (word ^ word // 65536 for word in (a, b, c, d))
    return a, b, c, d


def keep_pattern(dropout: Seed, shape: tuple[int, ...]) -> NumpyArray:
    """Which weights (..., H, M, N) dropout keeps.

    The head, counted through all leading axes, is hashed with the seed (and a 1, for the purpose) into two words; these
    are hashed with the positions of query and key. A weight is kept when the upper 24 bits of the second word reach
    ``rate * 2**24``.
    """
    *leading, rows, columns = shape
    low, high = dropout.seed % WORD, dropout.seed // WORD % WORD
    threshold = round(dropout.rate * 2**24)
    keep = np.empty((int(np.prod(leading, dtype=int)), rows, columns), dtype=bool)
    for head, query, column in np.ndindex(keep.shape):
        first, second, *_ = pcg4d((low, high, head, 1))
        keep[head, query, column] = pcg4d((first, second, query, column))[1] >> 8 >= threshold
    return keep.reshape(shape)
