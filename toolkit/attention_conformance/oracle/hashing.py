"""The finalizer of MurmurHash3 in Python's integers, and the pattern of kept weights that dropout draws from it."""

from __future__ import annotations

import numpy as np

from attention_conformance.problem import NumpyArray, Seed

WORD = 2**32


def mixed(word: int) -> int:
    """The finalizer ``fmix32`` of MurmurHash3."""
    word ^= word // 2**16
    word = word * 2246822507 % WORD
    word ^= word // 2**13
    word = word * 3266489909 % WORD
    return word ^ word // 2**16


def hashed(words: tuple[int, ...]) -> int:
    """Hash words of 32 bits, one after the other, each told apart by a multiple of 2654435769."""
    state = 0
    for position, word in enumerate(words):
        state = mixed(state ^ mixed(word ^ (position + 1) * 2654435769 % WORD))
    return state


def keep_pattern(dropout: Seed, shape: tuple[int, ...]) -> NumpyArray:
    """Which weights (..., H, M, N) dropout keeps.

    What is hashed is the seed (its low word first), a 1 for the purpose, the head counted through all leading axes, and
    the positions of query and key. A weight is kept when the upper 24 bits of the hash reach ``rate * 2**24``.
    """
    *leading, rows, columns = shape
    low, high = dropout.seed % WORD, dropout.seed // WORD % WORD
    threshold = round(dropout.rate * 2**24)
    keep = np.empty((int(np.prod(leading, dtype=int)), rows, columns), dtype=bool)
    for head, query, column in np.ndindex(keep.shape):
        keep[head, query, column] = hashed((low, high, 1, head, query, column)) // 2**8 >= threshold
    return keep.reshape(shape)
