"""FlexAttention inside of a program that a user compiles: in its graph, with no break and no operator that reads."""

import importlib
import math

import numpy as np
import pytest
import torch
from call_table import Sizes, options_of
from torch_kernel_helpers import accelerator, compiled

import attention_core as ac
from attention_core import explain_attention

attention = ac.scaled_dot_product_attention
SIZES = Sizes((2,), 4, 2, 150, 150, 16, 16)


@pytest.fixture
def arrays(rng, put):
    return put(SIZES.arrays(rng), dtype="float32")


@pytest.fixture(autouse=True)
def flex(backend, monkeypatch):
    """The kernel, in programs alone: PyTorch refuses its gradient on a CPU."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    kernel = importlib.import_module("attention_torch.kernels.flex").FlexAttention(("cpu",))
    monkeypatch.setattr(module, "_validate_device", lambda *arrays: None)
    monkeypatch.setattr(backend, "kernels", (kernel,))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
@pytest.mark.parametrize("name", ["segments", "softcap", "sinks"])
def test_the_kernel_is_a_part_of_the_program(name, arrays, put):
    graphs = []
    options = options_of(name, SIZES, lambda x: put(x, dtype="float32" if x.dtype.kind == "f" else None))

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    expected = attention(*arrays, **options, implementation="dense")
    with accelerator():
        found = compiled(torch, lambda *arrays: attention(*arrays, **options), keep)(*arrays)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)
    operators = [str(node.target) for graph in graphs[0].modules() for node in graph.graph.nodes]
    assert len(graphs) == 1
    assert "flex_attention" in operators
    assert not [each for each in operators if "attention_core" in each or "item" in each.rpartition(".")[2].split("_")]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
@pytest.mark.parametrize("wrong", [0.5, math.nan])
def test_nothing_masked_leaks_out_of_a_program_that_is_asked_to_look(wrong, arrays, put, rng):
    """Output and gradients, where all are numbers and where a value is not."""
    options = {"mask": ac.SlidingWindow(left=33, right=4)} | ({"assume_finite": False} if math.isnan(wrong) else {})
    arrays[2][0, 1, 41, 3] = wrong

    def results(attend):
        leaves = [x.clone().requires_grad_() for x in arrays]
        output = attend(*leaves)
        factor = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
        return [output.detach(), *torch.autograd.grad(output, leaves, factor)]

    expected = results(lambda *arrays: attention(*arrays, **options, implementation="dense"))
    with accelerator():
        found = results(compiled(torch, lambda *arrays: attention(*arrays, **options)))
    for one, other in zip(found, expected, strict=True):
        if other is expected[3]:
            one[0, 1, 41] = other[0, 1, 41]  # a replaced element has no gradient in the definition
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-5)


def test_tables_of_a_score_modification_are_made_outside_of_programs(arrays):
    alibi = ac.scores.alibi(SIZES.heads)
    expected = attention(*arrays, score_mod=alibi, implementation="dense")
    assert explain_attention(*arrays, score_mod=alibi).chosen == "fused"
    found = compiled(torch, lambda *arrays: attention(*arrays, score_mod=alibi))(*arrays)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)


def test_a_program_that_is_compiled_is_no_export(monkeypatch):
    """PyTorch 2.11 says so of each."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert not ac.backend.is_exporting(torch.zeros(1))
