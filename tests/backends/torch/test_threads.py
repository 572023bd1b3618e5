"""Blocks on several threads of PyTorch: the results of one thread, under the modes of the thread that asks."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attention_core as ac
from attention_torch import backend

THREADS = backend.loops.threads
OPTIONS = {
    "full": {"implementation": "blockwise"},
    "causal": {"is_causal": True, "implementation": "blockwise"},
    "lengths": {"mask": ac.KeyLengths(torch.tensor([19, 0, 11])), "implementation": "blockwise"},
    "reproducible": {"is_causal": True, "arithmetic": "reproducible"},
}


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """Two threads, for loops of any size over blocks so small that a call has many of them."""
    few = {"queries": 16, "keys": 8, "min_queries": 4, "dense_below": 0, "structured_below": 0, "exact_scores": 512}
    monkeypatch.setattr(backend, "tuning", backend.tuning._replace(**few))
    monkeypatch.setattr(THREADS, "least_work", 1)
    monkeypatch.setattr(THREADS, "fewest_bodies", 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def loops(monkeypatch):
    """The number of bodies of each loop that had threads."""
    counts, for_each = [], THREADS.for_each

    def count(number, *arguments):
        had_threads = for_each(number, *arguments)
        counts.extend([number] * had_threads)
        return had_threads

    monkeypatch.setattr(THREADS, "for_each", count)
    return counts


@pytest.mark.parametrize("name", OPTIONS)
def test_threads_do_not_show(name, loops):
    generator = torch.Generator().manual_seed(1)
    arrays = [torch.randn(3, 2, length, 8, generator=generator, requires_grad=True) for length in (24, 19, 19)]

    def results():
        output = ac.scaled_dot_product_attention(*arrays, **OPTIONS[name])
        return output, *torch.autograd.grad(output.sin().sum(), arrays)

    with torch.no_grad():
        found = [ac.scaled_dot_product_attention(*arrays, **OPTIONS[name]) for _ in range(5)]
    assert loops
    with torch.inference_mode():
        found.append(ac.scaled_dot_product_attention(*arrays, **OPTIONS[name]))
    assert found[-1].is_inference()
    found, gradients = [*found, results()[0]], results()[1:]
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    loops.clear()
    output, *expected = results()
    assert not loops
    assert all(torch.equal(each, output) for each in found)
    assert all(map(torch.equal, gradients, expected))


def test_functions_have_one_thread_and_record_as_the_caller_does():
    seen = []
    with torch.enable_grad():
        assert THREADS.for_each(9, lambda *_: seen.append((torch.get_num_threads(), torch.is_grad_enabled())), None, 1)
    with torch.no_grad():
        assert THREADS.for_each(9, lambda *_: seen.append((torch.get_num_threads(), torch.is_grad_enabled())), None, 1)
    assert seen == [(1, True)] * 9 + [(1, False)] * 9
    assert torch.get_num_threads() == 2


def test_a_thread_that_begins_during_a_loop_has_all_threads():
    seen = []

    def body(index, state):
        user = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        user.start()
        user.join()

    assert THREADS.for_each(9, body, None, 1)
    assert seen == [2] * 9


class Counted(TorchDispatchMode):
    """What sees the operations of this thread, and of no other."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_what_counts_operations_sees_those_of_one_thread():
    with Counted():
        assert not THREADS.for_each(9, pytest.fail, None, 1)
    torch.jit.trace(lambda x: x + THREADS.for_each(9, pytest.fail, None, 1), torch.ones(1), check_trace=False)
    assert THREADS.for_each(9, lambda *_: None, None, 1)


@pytest.mark.parametrize("arithmetic", ["fast", "reproducible"])
def test_a_shared_bias_has_the_gradient_of_all_samples(arithmetic, loops):
    """Samples add to it in turn: a sum is read before it is written."""
    generator = torch.Generator().manual_seed(2)
    arrays = [torch.randn(6, 1, length, 8, generator=generator) for length in (24, 19, 19)]
    bias = torch.randn(24, 19, generator=generator, requires_grad=True)

    def gradient():
        options = {"arithmetic": arithmetic} if arithmetic != "fast" else {"implementation": "blockwise"}
        return torch.autograd.grad(ac.scaled_dot_product_attention(*arrays, bias=bias, **options).sin().sum(), bias)[0]

    found = [gradient() for _ in range(5)]
    assert 6 in loops
    torch.set_num_threads(1)
    expected = gradient()
    assert all(torch.equal(each, expected) for each in found)
