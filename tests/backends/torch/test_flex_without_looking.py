"""FlexAttention on an accelerator: the host reads no value, and nothing masked leaks. On a CPU that plays one."""

import importlib
import math

import numpy as np
import pytest
from flex_helpers import OPTIONS, SHAPES, as_kernel
from pairwise import covering
from torch_kernel_helpers import accelerator, unread

import attention_core as ac
from attention_core import explain_attention

attention = ac.scaled_dot_product_attention
UNMASKED = ("alibi", "function", "scale", "scale of an array")  # the second is cut to the length of its mask


@pytest.fixture
def torch():
    return importlib.import_module("torch")


@pytest.fixture
def flex(torch, backend, monkeypatch):
    return as_kernel(backend, monkeypatch)


@pytest.fixture
def arrays(torch, rng):
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
def test_of_numbers_the_result_is_that_of_the_definition(name, torch, flex, arrays, put, rng):
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


@pytest.mark.parametrize("dims", [(), (2, 1)], ids=str)
def test_a_function_of_scores_knows_spoilt_keys_whatever_the_leading_axes(dims, torch, flex, arrays, put, rng):
    options = OPTIONS["function"](put, rng) | {"mask": ac.SlidingWindow(left=33, right=9)}
    arrays = [x[0].expand(*dims, *x.shape[1:]).clone() for x in arrays]
    arrays[1][..., 1, 41, 3] = math.nan
    expected = attention(*(x.double() for x in arrays), **wide(torch, options), implementation="blockwise")
    with accelerator(), unread(torch):
        found = attention(*arrays, **options, implementation=flex.name)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5)


def is_hidden(row):
    """Whether the kernel hides a number: without a mask, it multiplies infinities as it does."""
    return len(row) < 2 or math.isnan(row[1]) or row[0] not in UNMASKED


@pytest.mark.parametrize(
    ("name", "wrong", "side", "index"),
    [
        (name, wrong, *at)
        for name, wrong, at in covering(
            OPTIONS,
            (math.nan, math.inf, -math.inf, 1e30),
            ((0, 37), (1, 41), (1, 200), (2, 3), (2, 138)),
            where=is_hidden,
        )
    ],
)
def test_a_spoilt_vector_shows_where_it_is_attended_to_and_nowhere_else(
    name, wrong, side, index, torch, flex, arrays, put, rng
):
    """The definition says where, of NaN in place of an infinity, whose weight may be 0, or of a number too large."""
    options = OPTIONS[name](put, rng)
    spoilt = [x.clone() for x in arrays]
    spoilt[side][0, 1, index, 3] = wrong
    defined = [x.double() for x in spoilt]
    defined[side][0, 1, index, 3] = math.nan
    expected = results(torch, defined, wide(torch, options) | {"implementation": "blockwise"})
    with accelerator(), unread(torch):
        found = results(torch, spoilt, options)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if name == "sinks" and number == 4 and side < 2:
            continue  # the definition multiplies the NaN of a row by weights of 0
        same = torch.ones_like(one, dtype=torch.bool)
        if number - 2 == side:
            same[0, 1, index] = False  # a replaced element has no gradient in the definition
        assert torch.equal(one[same].isfinite(), other[same].isfinite()), number
        finite = same & other.isfinite()
        np.testing.assert_allclose(one[finite], other[finite], rtol=0, atol=3e-5)
