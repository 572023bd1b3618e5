"""The finalizer of MurmurHash3, of integers or arrays of them, and the weights that dropout keeps by it."""

from __future__ import annotations

from typing import Any

import numpy as np

from attention_conformance.problem import NumpyArray, Seed

WORD = 2**32


def mixed(word: Any) -> Any:
    """The finalizer ``fmix32`` of MurmurHash3."""
    word = word ^ word // 2**16
    word = word * 2246822507 % WORD
    word = word ^ word // 2**13
    word = word * 3266489909 % WORD
    return word ^ word // 2**16


def hashed(words: tuple[Any, ...]) -> Any:
    """Hash words of 32 bits, one after the other, each distinguished by a multiple of 2654435769."""
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
    places = np.indices((int(np.prod(leading, dtype=int)), rows, columns), dtype=np.uint64)
    return np.asarray(hashed((low, high, 1, *places)) // 2**8 >= threshold).reshape(shape)
