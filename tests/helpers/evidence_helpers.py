"""Comparisons that failed once and were not explained: each side is computed twice, and kept if they differ."""

from pathlib import Path

import pytest

from attention_benchmark.evidence import keep

FOLDER = Path(__file__).parents[2] / ".evidence"


def compare_twice(name, compare, *, inputs, reference, result, folder=FOLDER):
    """Compare a result with its reference; on failure keep both, and say which changed from one time to the next.

    The functions return lists of NumPy arrays, and take those of the inputs.
    """
    drawn, again = ([array.copy() for array in inputs], inputs)
    references, results = ([function(inputs) for _ in range(2)] for function in (reference, result))
    try:
        compare(results[0], references[0])
        compare(results[1], references[1])
    except AssertionError as error:
        told = keep(folder, name, inputs=(drawn, again), reference=tuple(references), result=tuple(results))
        pytest.fail(f"{error}\n{told}")
