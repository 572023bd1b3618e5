"""Functions of users under one compiled program of PyTorch."""

import functools
import importlib

import pytest
from tracing_helpers import assert_same

import attention_core as ac

pytestmark = [
    pytest.mark.needs("torch"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function"),
]


@pytest.fixture(scope="module")
def torch():
    library = importlib.import_module("torch")
    importlib.import_module("torch._dynamo")
    return library


def closed_over(factor):
    return lambda *arguments: arguments[0] * factor


def by_default(factor):
    def function(scores, batch, head, query, key, factor=factor):
        return scores * factor

    return function


def by_keyword(factor):
    return functools.partial(by_default(1.0), factor=factor)


@pytest.mark.parametrize(
    ("kind", "make"), [("score_mod", by_default), ("score_mod", by_keyword), ("mask", closed_over)]
)
def test_functions_of_one_code_under_one_program_are_not_confused(torch, kind, make):
    def rule(factor):
        function = make(factor)
        return ac.MaskFunction(lambda b, h, query, key: function(query - key, b, h, query, key) < 4)

    def attend(x, function):
        return ac.scaled_dot_product_attention(x, x, x, **{kind: function}, implementation="blockwise")

    torch._dynamo.reset()
    program, x = torch.compile(attend, fullgraph=True, backend="aot_eager"), torch.randn(1, 2, 20, 4)
    functions = [(make if kind == "score_mod" else rule)(factor) for factor in (0.5, 2.0, 3.0)]
    for function in functions:
        assert_same("torch", program(x, function), attend(x, function))


def test_functions_that_hold_no_values_share_a_program(torch):
    compiled = []

    def count(graph, arrays):
        compiled.append(graph)
        return graph

    def attend(x, function):
        return ac.scaled_dot_product_attention(x, x, x, score_mod=function, implementation="blockwise")

    torch._dynamo.reset()
    program, x = torch.compile(attend, fullgraph=True, backend=count), torch.randn(1, 2, 20, 4)
    for _ in range(3):
        program(x, lambda scores, batch, head, query, key: scores * 2)
    assert len(compiled) == 1
