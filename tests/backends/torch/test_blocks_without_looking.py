"""Blocks on an accelerator: the host reads no value, whatever is asked for. On a CPU that plays one."""

import math

import numpy as np
import pytest
import torch
from flex_helpers import OPTIONS, H
from pairwise import pairwise
from torch_kernel_helpers import accelerator, unread

import attention_core as ac

attention = ac.scaled_dot_product_attention
SHAPES = (2, H, 150, 6), (2, 2, 261, 6), (2, 2, 261, 5)
BLOCKS = {
    **OPTIONS,
    "dropout": lambda put, rng: {"dropout": ac.Dropout(0.3, 5), "is_causal": True},
    "narrow window": lambda put, rng: {"mask": ac.SlidingWindow(left=30, right=0)},
    "window and lengths": lambda put, rng: {
        "mask": ac.SlidingWindow(left=30, right=2) & ac.KeyLengths(put(np.asarray([70, 200])))
    },
}


@pytest.fixture
def arrays(backend, rng, monkeypatch):
    small = backend.tuning._replace(queries=64, keys=32, min_queries=16, backward_keys=32)
    monkeypatch.setattr(backend, "tuning", small)
    return [torch.asarray(rng.standard_normal(dims)) for dims in SHAPES]


def results(torch, arrays, options):
    """Output, logsumexp and gradients."""
    leaves = [x.detach().requires_grad_() for x in arrays]
    result = attention(*leaves, **options, return_logsumexp=True)
    factor = torch.linspace(-1, 1, result.output.numel(), dtype=torch.float64).reshape(result.output.shape)
    gradients = torch.autograd.grad(result.output, leaves, factor)
    return [x.detach() for x in (result.output, result.logsumexp, *gradients)]


def doubled(torch, options):
    """Options whose bias and sinks are float64, as queries are."""
    return {name: option.double() if name in ("bias", "sinks") else option for name, option in options.items()}


@pairwise(
    name=["mask causal", "mask lengths", "mask array", "window and lengths", "bias", "dropout"],
    wrong=[math.nan, math.inf, -math.inf],
    where=[(0, 37), (1, 41), (2, 138)],
)
def test_what_is_not_finite_shows_where_it_does_on_a_host(name, wrong, where, arrays, put, rng):
    options = doubled(torch, BLOCKS[name](put, rng)) | {"implementation": "blockwise"}
    side, index = where
    spoilt = [x.clone() for x in arrays]
    spoilt[side][0, 1, index, 3] = wrong
    expected = results(torch, spoilt, options)
    with accelerator(), unread(torch):
        found = results(torch, spoilt, options)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["mask causal", "mask window", "narrow window", "window and lengths"])
def test_blocks_beyond_the_reach_of_a_rule_are_left_out(name, arrays, put, rng, backend, monkeypatch):
    """Those that a host leaves out by numbers, an accelerator does, too."""
    options = BLOCKS[name](put, rng) | {"implementation": "blockwise"}
    products, matmul = [], type(backend.loops).matmul

    def counted(self, x, y, workspace, name):
        products.append(name)
        return matmul(self, x, y, workspace, name)

    monkeypatch.setattr(type(backend.loops), "matmul", counted)
    attention(*arrays, **options)
    on_host, products[:] = len(products), []
    with accelerator(), unread(torch):
        attention(*arrays, **options)
    limit = {"window and lengths": 2.0}.get(name, 1.0)  # whose lengths only a host reads
    assert len(products) <= limit * on_host
