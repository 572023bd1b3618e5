"""How precise the gradients of a ring are next to large scores. Threads are ranks."""

import numpy as np
import pytest
import shard_helpers
import torch
from shard_helpers import threads_as_ranks

import attention_core as ac

pytestmark = pytest.mark.needs("torch")


@pytest.fixture
def ranks(backend, monkeypatch):
    """``run(size, function)``: results of ``function(group)`` by ranks."""
    with threads_as_ranks(backend, monkeypatch) as run:
        yield run


def gradients_of(arrays, group=None, **options):
    """The output and gradients of a loss, of ranks or of one process."""
    arrays, shards = [torch.from_numpy(x) for x in arrays], {}
    if group is not None:
        shards = {"shards": ac.Shards(group, "contiguous", "ring")}
        arrays = [ac.shard(x, shards["shards"]) for x in arrays]
    arrays = [x.requires_grad_() for x in arrays]
    output = ac.scaled_dot_product_attention(*arrays, **options, **shards)
    finite = torch.where(output.isfinite(), output, 0.0)
    return [x.detach().numpy() for x in (output, *torch.autograd.grad((finite**2).sum(), arrays))]


@pytest.mark.parametrize("size", [1e5, 50.0])
def test_hops_keep_what_rounding_takes_from_their_logsumexp(ranks, size):
    """Of 512 equal scores, it is the logarithm of their number."""
    query, key = np.full((1, 1, 8, 1), size, np.float32), np.full((1, 1, 512, 1), size / 10, np.float32)
    arrays = query, key, np.random.default_rng(0).standard_normal((1, 1, 512, 1)).astype(np.float32)
    *_, expected = gradients_of(arrays, scale=1.0, implementation="blockwise")
    parts = ranks(4, lambda group: gradients_of(arrays, group, scale=1.0))
    np.testing.assert_allclose(np.concatenate([each[-1] for each in parts], axis=-2), expected, rtol=1e-5)


@pytest.mark.parametrize("size", [64, 500, 2000])
def test_sinks_next_to_large_scores_are_as_precise_as_these(ranks, size):
    """A score and a logsumexp lose up to 6e-8 of their size each, and weights, of sinks too, are off by a share of both."""
    rng = np.random.default_rng(0)
    arrays = [np.sqrt(size / 9) * rng.standard_normal((1, 2, 64, 8)).astype(np.float32) for _ in range(2)]
    arrays += [rng.standard_normal((1, 2, 64, 8)).astype(np.float32), np.full(2, size, np.float32)]

    def computed(dtype, group=None):
        tensors, options = [torch.from_numpy(x.astype(dtype)) for x in arrays], {}
        if group is not None:
            options = {"shards": ac.Shards(group, strategy="ring")}
            tensors = [x if x.ndim == 1 else ac.shard(x, options["shards"]) for x in tensors]
        tensors = [x.requires_grad_() for x in tensors]
        output = ac.scaled_dot_product_attention(*tensors[:3], sinks=tensors[3], scale=1.0, is_causal=True, **options)
        return [x.detach().numpy() for x in (output, *torch.autograd.grad((output**2).sum(), tensors[2:]))]

    expected, parts = computed("float64"), ranks(4, lambda group: computed("float32", group))
    for n, x in enumerate(expected):
        rows = [each[n] for each in parts]
        found = sum(rows) if x.ndim == 1 else shard_helpers.in_order(rows, -2, 4, "zigzag", 64)
        assert np.abs(found - x).max() <= 1.2e-7 * size * np.abs(x).max(), n
