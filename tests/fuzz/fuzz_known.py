"""Misbehaviour that is known, and left out of what the fuzzer draws or compares.

Each has a name, and a function that shows it. A test requires that it still does: whoever mends one removes it here,
and with it the exclusion that names it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

import attention_core as ac
import attention_core.layers
from attention_core.layouts import LAYOUTS
from attention_numpy import files

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


@known("pieces in reproducible arithmetic do not sum small weights again, as the whole does")
def SMALL_WEIGHTS_IN_PIECES() -> bool:  # noqa: N802
    query, key = np.ones((1, 1, 1), np.float32), np.asarray([[[0.0], [-20.0]]], np.float32)
    value, exact = np.asarray([[[0.0], [1.0]]], np.float32), {"scale": 1.0, "arithmetic": "reproducible"}
    extent = ac.attention_extent(query, key, value, scale=1.0)
    partial = ac.partial_attention(query, key, value, extent=extent, **exact)
    whole = ac.scaled_dot_product_attention(query, key, value, **exact)
    return bool((ac.complete_partial(partial).output != whole).any())


@known("reproducible arithmetic loses scores of large channels times small ones")
def MIXED_CHANNELS() -> bool:  # noqa: N802
    query, key = np.asarray([[[8192, 2**-13]]], np.float16), np.asarray([[[3 * 2**-13, 3 * 8192]]], np.float16)
    scores = ac.attention_scores(query, key, scale=0.5, arithmetic="reproducible")
    return float(scores[0, 0, 0]) != 3


@known("a line break in a name of a file is printed as it is")
def LINES_IN_NAMES() -> bool:  # noqa: N802
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tree.safetensors"
        files.save_arrays(path, {}, {"attention-core": json.dumps({"version": 1, "tree": ["\n"], "settings": None})})
        try:
            files.load_tree(path)
        except files.FileError as error:
            return "\n" in str(error)
    return False


@known("a number among the arrays of a layout is an AttributeError")
def NUMBERS_AS_ARRAYS() -> bool:  # noqa: N802
    layout, layer = LAYOUTS["keras"], ac.layers.MultiHeadAttention(4, 2)
    arrays = layout.write(layer, layer.init(0, xp=np))
    try:
        layout.read(arrays | {"query/bias": 1.5})
    except AttributeError:
        return True
    except (TypeError, ValueError):
        return False
    return False


WORDS = {"arithmetic", "implementation", "data_format", "dtype", "dims"}
FLAGS = {"return_weights", "return_logsumexp", "norm_first", "pool", "ragged"}
INITIALIZERS = {"uniform", "normal", "truncated", "glorot", "he", "lecun"}
HOLDS_ARRAYS = {"an array", "a number in an array", "an integer in an array", "a map", "a dropout", "an object"}


def is_known_call(call: Any) -> bool:
    """Whether a wrong call is one of those that are known to be accepted, refused in other words, or endless."""
    return any(_is_known_change(call.name, path, wrong) for path, wrong in call.changes)


def _is_known_change(function: str, path: tuple[Any, ...], wrong: str) -> bool:
    name, huge = path[-1], wrong in ("2**40", "-2**40")
    return any(
        (
            name == "max_distance" and huge,  # loops
            name in FLAGS,  # are not checked
            (name in WORDS or "dims" in path or (function in INITIALIZERS and name == 1))
            and wrong in HOLDS_ARRAYS,  # are printed with their arrays
            "dims" in path and wrong == "True",
            name == "offset" and path[0] in ("score_mod", "offset") and huge,
            name == "score_mod"
            and wrong in ("a function", "a class"),  # that take other arguments: errors of their own
            function == "cache mask" and name == 1 and huge,
            function in ("causal", "window", "segments", "lengths") and name in (1, 2),  # of to_array: are not checked
            function == "segments",  # to_array does not look at the shapes
            function == "from lengths" and name == 1 and huge,
            function in ("merge", "merge extents") or path[0] == "extent",  # dtypes by names of the library
        )
    )
