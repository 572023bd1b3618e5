"""Calls of PyTorch in which the host reads no value."""

import math
import threading

import pytest
import torch
from torch_kernel_helpers import unread

import attention_core as ac


def test_reading_is_an_error():
    x = torch.ones(2)
    for read in (lambda x: x.tolist(), lambda x: bool((x > 0).all()), lambda x: x.sum().item(), lambda x: x[x > 0]):
        with pytest.raises(AssertionError, match="reads"), unread(torch):
            read(x)
    big = torch.ones(1, 1, 300, 8)
    with pytest.raises(AssertionError, match="reads"), unread(torch):
        ac.scaled_dot_product_attention(big, big, big, is_causal=True)


OPTIONS = {
    "full": lambda torch: {},
    "causal": lambda torch: {"is_causal": True},
    "offset": lambda torch: {"mask": ac.Causal(offset=2)},
    "window": lambda torch: {"mask": ac.SlidingWindow(5)},
    "length": lambda torch: {"mask": ac.KeyLengths(5)},
    "causal and length": lambda torch: {"mask": ac.Causal() & ac.KeyLengths(5)},
    "array": lambda torch: {"mask": torch.arange(300)[:, None] > torch.arange(300) - 3},
    "bias": lambda torch: {"bias": torch.where(torch.arange(300) < 7, 0.5, -math.inf)},
    "scale": lambda torch: {"is_causal": True, "scale": torch.tensor(0.3)},
}


@pytest.mark.parametrize("logsumexp", [False, True])
@pytest.mark.parametrize("implementation", ["auto", "blockwise", "dense"])
@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_is_read_that_is_assumed_to_be_finite(name, implementation, logsumexp):
    leaves = [torch.randn(1, heads, 300, 8, requires_grad=True) for heads in (4, 2, 2)]
    options = OPTIONS[name](torch) | {"implementation": implementation, "return_logsumexp": logsumexp}
    with unread(torch, structure=True):
        result = ac.scaled_dot_product_attention(*leaves, **options, assume_finite=True)
        torch.autograd.grad((result.output if logsumexp else result).sum(), leaves)


def compiled_and_spoilt(torch):
    """A compiled call under a causal mask, whose last key has a value that is NaN."""
    query, key, value = (torch.randn(1, 2, 9, 8) for _ in range(3))
    value[..., 8, :] = math.nan
    torch._dynamo.reset()
    attend = torch.compile(
        lambda query, key, value: ac.scaled_dot_product_attention(
            query, key, value, is_causal=True, implementation="dense"
        ),
        fullgraph=True,
        backend="eager",
    )
    return lambda: attend(query, key, value)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
def test_a_program_compiled_in_a_context_is_traced_again_in_others():
    """In a context of another setting, and in another thread, also while the first one is open."""
    attend = compiled_and_spoilt(torch)

    def leaks():
        return bool(attend()[..., :8, :].isnan().any())

    found = []
    with ac.config_context(assume_finite=True):
        assert leaks()
        thread = threading.Thread(target=lambda: found.append(leaks()))
        thread.start()
        thread.join()
    with ac.config_context(assume_finite=False):
        found.append(leaks())
        with ac.config_context(assume_finite=True):
            assert leaks()
    assert found == [False, False]
