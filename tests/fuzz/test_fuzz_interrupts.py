"""A KeyboardInterrupt at any line of the project: the next call gives the same bits."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_problems import Drawn, called, forced_blocks, pool_of, problems
from hypothesis import strategies as st

import attention_core as ac
from attention_conformance.problem import Problem

PROJECT = tuple(str(Path(module.__file__).parent) for module in (ac, sys.modules["attention_numpy"]))


class Interrupt:
    """Raises at the n-th line that the project runs, by the debugger's hook; counts the lines."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PROJECT):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> Interrupt:
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, kind: Any, *_: Any) -> bool:
        sys.settrace(self.before)
        return kind is KeyboardInterrupt


def bits(drawn: Drawn, problem: Problem, backend: Any) -> dict[str, bytes]:
    return {name: each.tobytes() for name, each in called(drawn, problem, backend).items()}


def check_call(case: tuple[Drawn, int], backend: Any) -> None:
    drawn, line = case
    problem, whole = drawn.problem(), replace(drawn, blocks=None)
    with forced_blocks(drawn, backend):
        expected, tuning = bits(whole, problem, backend), backend.tuning
        with Interrupt(line):
            bits(whole, problem, backend)
        assert backend.tuning is tuning
        assert bits(whole, problem, backend) == expected


def check_first_call(line: int, backend: Any) -> None:
    """Nothing is remembered yet of the signature: a length of its own makes it new."""
    x = backend.from_numpy(np.ones((1, 2, 3 + line % 5, 4), np.float32))
    with Interrupt(line):
        ac.scaled_dot_product_attention(x, x, x, is_causal=True, scale=1 + line / 7)
    for wrong in ({"scale": "text"}, {"softcap": -1.0}, {"is_causal": 2}):
        with pytest.raises((TypeError, ValueError), match="expected"):
            ac.scaled_dot_product_attention(x, x, x, **{"is_causal": True, "scale": 1 + line / 7} | wrong)
    found = backend.to_numpy(ac.scaled_dot_product_attention(x, x, x, is_causal=True, scale=1 + line / 7))
    np.testing.assert_array_almost_equal_nulp(found, np.ones_like(found), 2)  # reciprocals differ between processors


@pytest.mark.cases(6)
def test_interrupted_calls(fuzz, backend):
    drawn = problems(pool=pool_of(backend), dtypes=("float32",), arithmetics=("fast", "reproducible"))
    fuzz(lambda case: check_call(case, backend), st.tuples(drawn, st.integers(1, 1500)))


@pytest.mark.cases(20)
def test_interrupted_first_calls(fuzz, backend):
    fuzz(lambda line: check_first_call(line, backend), st.integers(1, 500))
