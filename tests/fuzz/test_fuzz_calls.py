"""Wrong calls of every public function: an error of the contract before any work, the same on every library."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
from fuzz_calls import Call, built, call_of, calls

from attention_core import Explanation
from attention_core.backend import get_backend

NUMPY = get_backend("numpy")


def outcome(call: Call, backend: Any) -> tuple[str, str]:
    """The class and the words of the error, or the shapes and floating types of the result."""
    valid = call_of(call)
    try:
        function, positional, options = built(valid, backend.from_numpy)
        if hasattr(function, "needs_xp"):
            options["xp"] = backend.namespace
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numbers that overflow or divide by zero
            result = function(*positional, **options)
    except Exception as error:
        return type(error).__name__, plain(str(error), backend)
    return "", described(result)


def plain(message: str, backend: Any) -> str:
    """The words without those that name a library."""
    kind = type(backend.from_numpy(np.ones(2, np.float32))).__name__
    return re.sub(rf"\b({kind}|array_api_strict|{backend.name})\b", "…", message)


def described(result: Any) -> str:
    """Shapes, and floating types, of all arrays; of an explanation none, as libraries have kernels of their own."""
    if isinstance(result, tuple) and not isinstance(result, Explanation):
        return f"({', '.join(map(described, result))})"
    if not hasattr(result, "dtype"):
        return "" if isinstance(result, str | int | None) else type(result).__name__
    floating = re.search(r"b?float\d+", str(result.dtype))
    return f"{floating[0] if floating else ''}{tuple(result.shape)}"


def assert_is_of_the_contract(kind: str, words: str) -> None:
    """Fail unless an error is of a known class, in one line, with the words of line 12."""
    assert kind in ("TypeError", "ValueError"), f"{kind}: {words}"
    assert re.fullmatch(r"expected .*; got .*", words), f"{kind}: {words}"


def check(call: Call, backend: Any) -> None:
    kind, words = outcome(call, backend)
    if kind:
        assert_is_of_the_contract(kind, words)
    if backend.name != "numpy" and not any(wrong == "fused" for _, wrong in call.changes):
        expected = outcome(call, NUMPY)
        assert (kind, words) == expected, f"{backend.name} says {kind} {words!r}, numpy {expected[0]} {expected[1]!r}"


@pytest.mark.needs("float16")  # which is one of the wrong types
@pytest.mark.cases(60)
def test_malformed_calls(fuzz, backend):
    fuzz(lambda call: check(call, backend), calls())
