"""Hops of a ring by PyTorch's kernel for CPUs. Threads are ranks."""

import numpy as np
import pytest
import shard_helpers
import torch
from shard_helpers import joined, of_rank, threads_as_ranks, whole

import attention_core as ac
from attention_torch import kernels

pytestmark = pytest.mark.needs("torch")
METHODS = "attend_to_piece", "piece_gradients"


@pytest.fixture
def ranks(backend, monkeypatch):
    """``run(size, function)``: results of ``function(group)`` by ranks."""
    with threads_as_ranks(backend, monkeypatch) as run:
        yield run


@pytest.fixture
def pieces(monkeypatch):
    """Which pieces the kernel was asked for, by method, and whether it has answered."""
    asked = {name: [] for name in METHODS}

    def watched(name, function):
        def method(*arguments):
            found = function(*arguments)
            asked[name].append(found is not None)
            return found

        return staticmethod(method)

    for name in METHODS:
        method = watched(name, getattr(kernels.ScaledDotProduct, name))
        monkeypatch.setattr(kernels.ScaledDotProduct, name, method)
    return asked


def of_one_width(heads=(4, 2), length=16, batch=2, dtype="float64", seed=0):
    """Inputs as those of `shard_helpers`, whose values are as wide as keys."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal((batch, count, length, 6)) for count in (heads[0], *heads[1:] * 2, heads[0])]
    return [x.astype(dtype) for x in (*arrays, rng.standard_normal((batch, heads[0], length)))]


# The option, ranks, split, length, and how many pieces go by the kernel: of a causal zigzag, 2 R + 1 of each rank.
VISITED = [
    ("none", 3, "zigzag", 18, 36), ("causal", 4, "zigzag", 96, 36),
    ("causal", 2, "contiguous", 16, 3), ("window", 4, "zigzag", 96, 0), ("window", 4, "contiguous", 32, 0),
    ("sinks", 4, "zigzag", 96, 36), ("bias of bhmn", 2, "zigzag", 16, 0), ("softcap", 2, "zigzag", 16, 0),
    ("score_mod with arrays", 2, "zigzag", 16, 0), ("dropout", 2, "zigzag", 16, 0),
    ("array", 2, "contiguous", 16, 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "size", "split", "length", "count"), VISITED)
@pytest.mark.parametrize(("dtype", "most"), [("float64", 1e-13), ("float32", 2e-6)])
def test_hops_by_the_kernel_have_the_numbers_of_the_whole(
    backend, put, ranks, pieces, monkeypatch, name, size, split, length, count, dtype, most
):
    monkeypatch.setattr(shard_helpers, "inputs", of_one_width)
    monkeypatch.setattr(backend, "tuning", backend.tuning._replace(structured_below=0))  # as of long sequences
    more = {"put": put, "length": length, "dtype": dtype}
    shards = {"split": split, "strategy": "ring", "length": length}
    parts = ranks(size, lambda group: of_rank(backend, ac.Shards(group, **shards), name, **more))
    expected = whole(backend, name, **more)
    found = joined(parts, split, expected)
    for key, x in expected.items():
        assert np.max(np.abs(found[key] - x)) <= most * np.max(np.abs(x)), key
    assert pieces == {"attend_to_piece": [True] * 2 * count, "piece_gradients": [True] * count}


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
def test_a_logsumexp_that_rounding_spoils_is_left_to_blocks(ranks, pieces, size):
    """Of 512 equal scores, blocks keep the logarithm of their number; the kernel weighs by what merging kept."""
    query, key = np.full((1, 1, 8, 1), size, np.float32), np.full((1, 1, 512, 1), size / 10, np.float32)
    arrays = query, key, np.random.default_rng(0).standard_normal((1, 1, 512, 1)).astype(np.float32)
    *_, expected = gradients_of(arrays, scale=1.0, implementation="blockwise")
    parts = ranks(4, lambda group: gradients_of(arrays, group, scale=1.0))
    np.testing.assert_allclose(np.concatenate([each[-1] for each in parts], axis=-2), expected, rtol=1e-5)
    assert pieces == {name: [size == 50] * 16 for name in METHODS}


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


@pytest.mark.parametrize("hidden", [np.nan, np.inf])
def test_hidden_keys_do_not_leak_into_hops_by_the_kernel(ranks, pieces, hidden):
    """The last query alone sees the last key, so that its rank leaves hops to blocks."""
    arrays = of_one_width((2, 2), 32, dtype="float32")[:3]
    expected = gradients_of([x[..., :31, :] for x in arrays], is_causal=True)
    arrays[1][..., 31, :], arrays[2][..., 31, :] = hidden, hidden
    parts = ranks(2, lambda group: gradients_of(arrays, group, is_causal=True))
    for found, x in list(zip(zip(*parts, strict=True), expected, strict=True))[:2]:  # output, and gradient of query
        found = np.concatenate(found, axis=-2)[..., :31, :]
        np.testing.assert_allclose(found, x, rtol=0, atol=2e-6 * np.abs(x).max())
    assert sorted(pieces["attend_to_piece"]) == [False, True, True]
    assert sorted(pieces["piece_gradients"]) == [False, False, True]  # the last output is not finite
