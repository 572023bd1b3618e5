"""Blocks on an accelerator: the host reads no value, whatever is asked for. On a CPU that plays one."""

import numpy as np
import pytest
import torch
from flex_helpers import OPTIONS, H
from torch_kernel_helpers import accelerator, unread

import attention_core as ac

attention = ac.scaled_dot_product_attention
SHAPES = (2, H, 150, 6), (2, 2, 261, 6), (2, 2, 261, 5)
BLOCKS = {
    **OPTIONS,
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
