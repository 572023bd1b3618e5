"""Threefry-2x32 with 20 rounds, in Python's integers, and the pattern of kept weights that dropout draws from it.

The generator is that of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import numpy as np

from attention_conformance.problem import NumpyArray, Seed

__all__ = ["keep_pattern", "threefry"]

ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA
WORD = 2**32


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Encrypt a counter of two words of 32 bits under a key of two words."""
    schedule = (*key, key[0] ^ key[1] ^ PARITY)
    first, second = (counter[0] + schedule[0]) % WORD, (counter[1] + schedule[1]) % WORD
    for step in range(20):
        first = (first + second) % WORD
        distance = ROTATIONS[step % 8]
        second = ((second << distance) % WORD | second >> (32 - distance)) ^ first
        if step % 4 == 3:
            injection = step // 4 + 1
            first = (first + schedule[injection % 3]) % WORD
            second = (second + schedule[(injection + 1) % 3] + injection) % WORD
    return first, second


def keep_pattern(dropout: Seed, shape: tuple[int, ...]) -> NumpyArray:
    """Which weights (..., H, M, N) dropout keeps.

    The head, counted through all leading axes, makes a key of the seed; query and key position make the counter. A
    weight is kept when the upper 24 bits of the first word reach ``rate * 2**24``.
    """
    *leading, rows, columns = shape
    seed = (dropout.seed % WORD, dropout.seed // WORD % WORD)
    threshold = round(dropout.rate * 2**24)
    keep = np.empty((int(np.prod(leading, dtype=int)), rows, columns), dtype=bool)
    for head, query, column in np.ndindex(keep.shape):
        bits, _ = threefry(threefry(seed, (head, 0)), (query, column))
        keep[head, query, column] = bits >> 8 >= threshold
    return keep.reshape(shape)
