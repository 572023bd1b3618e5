"""FlexAttention on an accelerator: the host reads no value, and nothing masked leaks. On a CPU that plays one."""

import math

import numpy as np
import pytest
import torch
from flex_helpers import OPTIONS, SHAPES, G, H, M, N, as_kernel
from torch_kernel_helpers import accelerator, unread

import attention_core as ac
from attention_core import explain_attention

attention = ac.scaled_dot_product_attention


@pytest.fixture
def flex(backend, monkeypatch):
    return as_kernel(backend, monkeypatch)


@pytest.fixture
def arrays(rng):
    return [torch.asarray(rng.standard_normal(dims), dtype=torch.float32) for dims in SHAPES]


def wide(torch, options):
    """Options for arrays of float64."""

    def widened(option):
        is_floating = isinstance(option, torch.Tensor) and option.is_floating_point()
        return option.double() if is_floating else option

    return {name: widened(option) for name, option in options.items()}


def results(torch, arrays, options):
    """Output, logsumexp and the gradients of both."""
    leaves = [x.detach().requires_grad_() for x in arrays]
    result = attention(*leaves, **options, return_logsumexp=True)
    both = result.output, result.logsumexp
    factors = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape) for x in both]
    some = [torch.where(x.isinf(), 0.0, x) for x in both[1:]]
    gradients = torch.autograd.grad([both[0], *some], leaves, factors)
    return [x.detach() for x in (*both, *gradients)]


@pytest.mark.parametrize("name", OPTIONS)
def test_of_numbers_the_result_is_that_of_the_definition(name, flex, arrays, put, rng):
    options = OPTIONS[name](put, rng)
    definition = wide(torch, options) | {"implementation": "dense"}
    expected = results(torch, [x.double() for x in arrays], definition)
    with accelerator(), unread(torch):
        told = explain_attention(*arrays, **options)
        assert (told.chosen, told.candidates[0].kernel) == ("fused", flex.name)
        found = results(torch, arrays, options)
        assumed = results(torch, arrays, options | {"assume_finite": True})
    for one, another, other in zip(found, assumed, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-5)
        np.testing.assert_allclose(another, other, rtol=0, atol=3e-5)


HIDING = {
    "mask offset": lambda put: {"mask": ac.Causal(offset=7)},
    "mask offsets": lambda put: {"mask": ac.Causal(offset=put(np.asarray([3, -9])))},
    "mask window": lambda put: {"mask": ac.SlidingWindow(left=33, right=4, offset=put(np.asarray(70)))},
    "mask lengths": lambda put: {"mask": ac.KeyLengths(put(np.asarray([0, 130])))},
    "mask causal and lengths": lambda put: {"mask": ac.Causal(offset=111) & ac.KeyLengths(put(np.asarray([50, 130])))},
    "mask either": lambda put: {
        "mask": ac.KeyLengths(put(np.asarray([5, 9]))) | ac.Causal(offset=put(np.asarray(-99)))
    },
    "mask documents": lambda put: {"mask": ac.Segments(put(np.arange(M) // 40), put(np.arange(N) // 40))},
    "mask array": lambda put: {"mask": put(np.arange(N) % 3 > 0)[None]},
    "mask of heads": lambda put: {
        "mask": put((np.arange(N) != 5) & ((np.arange(N) + np.arange(H)[:, None, None]) % 3 > 0))
    },
    "mask of keys": lambda put: {"mask": put(np.arange(N) % 3 > 0)},
    "mask length": lambda put: {"mask": ac.KeyLengths(100)},
    "bias": lambda put: {"bias": put(np.where(np.arange(N) % 3 == 1, -math.inf, 0.5), dtype="float32")},
    "bias and mask": lambda put: {
        "bias": put(np.where(np.arange(N) % 3 == 1, -math.inf, 0.5)[None], dtype="float32"),
        "mask": ac.KeyLengths(put(np.asarray([90, 130]))),
    },
}
"""Calls that hide keys from all queries of a sample."""


def with_nan_where_hidden(torch, arrays, options):
    """Keys and values that no query attends to, as the weights of the definition say, hold NaN."""
    weights = attention(*arrays, **options, implementation="dense", return_weights=True).weights
    hidden = (weights == 0).all(dim=-2).unflatten(1, (G, H // G)).all(dim=2)  # (B, G, N)
    assert hidden.any()
    assert not hidden.all()
    query, *others = arrays
    return [query, *(torch.where(hidden[..., None], math.nan, x) for x in others)]


@pytest.mark.parametrize("implementation", ["fused", "torch.nn.functional.scaled_dot_product_attention"])
@pytest.mark.parametrize("name", HIDING)
def test_what_is_hidden_from_all_queries_reaches_nothing(name, implementation, backend, arrays, put, monkeypatch):
    kernels = backend.kernels
    as_kernel(backend, monkeypatch)
    monkeypatch.setattr(backend, "kernels", (*kernels[:1], *backend.kernels))
    options = HIDING[name](put)
    value = arrays[2][..., :16] if "." in implementation else arrays[2]
    arrays = [*arrays[:2], value]
    expected = output_and_gradients(torch, arrays, options | {"implementation": "dense"})
    spoilt = with_nan_where_hidden(torch, arrays, options)
    with accelerator(), unread(torch):
        found = output_and_gradients(torch, spoilt, options | {"implementation": implementation})
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=3e-5)


def output_and_gradients(torch, arrays, options):
    leaves = [x.detach().requires_grad_() for x in arrays]
    output = attention(*leaves, **options)
    factor = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output.detach(), *torch.autograd.grad(output, leaves, factor)]


@pytest.mark.parametrize("name", ["mask causal", "mask window", "bias", "softcap"])
def test_who_asks_for_a_look_gets_no_leak_under_any_mask(name, flex, arrays, put, rng):
    options = OPTIONS[name](put, rng)
    arrays[2][0, 1, 138, 3] = math.nan
    expected = attention(*arrays, **options, implementation="blockwise")
    with accelerator():
        told = explain_attention(*arrays, **options, assume_finite=False)
        assert "leak" in told.candidates[0].refusal
        found = attention(*arrays, **options, assume_finite=False)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5)
