"""Presets of the benchmark, and its shapes with heads and queries."""

import pytest
from command_helpers import invoke

from attention_benchmark import CANDIDATES, Problem
from attention_benchmark.problem import PRESETS
from attention_cli import bench

DENSE = next(each for each in CANDIDATES if each.key == "numpy:eager:dense")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_problems(name, monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "_measured", lambda orders, memory, failures, without: (seen.extend(orders), [])[1])
    assert invoke("bench", "--backend", "numpy", "--preset", name).exit_code == 0
    problems = [problem for order in seen for problem in order.problems]
    forward = [Problem(**each) for each in PRESETS[name] if each.get("direction") != "fwd+bwd"]
    assert problems == [each for each in forward if DENSE.takes(each)]
    assert all(each.shape[1] % (each.kv_heads or 1) == 0 and each.num_queries <= each.shape[2] for each in problems)


def test_a_shape_has_queries_and_heads(monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "_measured", lambda orders, memory, failures, without: (seen.extend(orders), [])[1])
    shapes = [word for count in (1, 4) for word in ("--shape", f"2,4on2,{count}x40,8")]
    assert invoke("bench", "--backend", "numpy", *shapes, "--mask", "padded").exit_code == 0
    found = [problem for order in seen for problem in order.problems]
    assert found == [Problem((2, 4, 40, 8), "padded", queries=count, kv_heads=2) for count in (1, 4)]
