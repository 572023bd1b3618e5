"""Calls on a GPU that is pretended: none waits, by a value that is read or a copy, and all give the host's results."""

import importlib
import math

import numpy as np
import pretended_device as gpu
import pytest
import torch
from flex_helpers import OPTIONS

import attention_core as ac

B, H, G, D = 2, 4, 2, 16
CALLS = {
    **{name: make for name, make in OPTIONS.items() if name not in ("alibi", "relative bias")},
    "plain": lambda put, rng: {},
    "scale of an array, masked": lambda put, rng: {"scale": put(np.asarray(0.3), dtype="float32"), "is_causal": True},
    "lengths and causal": lambda put, rng: {"mask": ac.Causal() & ac.KeyLengths(put(np.asarray([9, 130])))},
    "dropout": lambda put, rng: {"dropout": ac.Dropout(0.3, 5), "is_causal": True},
    "seed": lambda put, rng: {"dropout": ac.Dropout(0.3, put(np.asarray([5, 6], dtype=np.int32)))},
}
BLOCKS = {**CALLS, **{name: OPTIONS[name] for name in ("alibi", "relative bias")}}  # whose tables a trace makes once


def check(gpu, torch, function, arrays):
    """Compare a function of a converter and of arrays on both devices, with its gradients."""
    expected = function(lambda x: x, [x.clone().requires_grad_(x.is_floating_point()) for x in arrays])
    with gpu.pretended():
        found = function(gpu.to_device, [x.requires_grad_(x.is_floating_point()) for x in gpu.to_device(arrays)])
    leaves = torch.utils._pytree.tree_leaves
    pairs = list(zip(leaves(gpu.to_host(found)), leaves(expected), strict=True))
    assert pairs
    for one, other in pairs:
        if isinstance(other, torch.Tensor):
            np.testing.assert_allclose(one.detach(), other.detach(), rtol=1e-4, atol=3e-5)


def call(make, rng, implementation="auto", **options):
    """A call as a function for `check`, with its gradients."""
    seed = int(rng.integers(2**30))

    def function(move, arrays):
        def put(x, dtype=None):
            return move(torch.asarray(np.asarray(x, dtype=dtype)))

        made = make(put, np.random.default_rng(seed)) | options
        result = ac.scaled_dot_product_attention(*arrays, **made, implementation=implementation)
        output = getattr(result, "output", result)
        return result, torch.autograd.grad(output.square().sum(), arrays)

    return function


def made(torch, rng, queries=150, keys=261):
    dims = (B, H, queries, D), (B, G, keys, D), (B, G, keys, 20)
    return [torch.asarray(rng.standard_normal(each), dtype=torch.float32) for each in dims]


def test_waiting_is_an_error():
    with gpu.pretended():
        x = gpu.to_device(torch.arange(4.0))
        for wait in (
            lambda: x.sum().item(),
            lambda: x[x > 1],
            lambda: x.tolist(),
            lambda: x.to("cpu"),
            lambda: torch.ones(3).to("cuda:0"),
            lambda: x + torch.ones(4),
        ):
            with pytest.raises(gpu.WaitsError):
                wait()
        with pytest.raises(NotImplementedError):  # a copy that waits, and that no operator tells of
            torch.asarray([1.0, 2.0], device="cuda:0")
        assert str((x + 1).device) == "cuda:0"


@pytest.mark.parametrize("name", CALLS)
def test_a_call_waits_for_nothing(name, rng):
    check(gpu, torch, call(CALLS[name], rng), made(torch, rng))


@pytest.mark.parametrize("implementation", ["blockwise", "dense"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_and_the_dense_form_wait_for_nothing(name, implementation, rng):
    check(gpu, torch, call(BLOCKS[name], rng, implementation, return_logsumexp=True), made(torch, rng))


def test_blocks_are_larger_than_on_a_host(rng, backend, monkeypatch):
    """As each costs launches, and one of a host keeps no GPU busy."""
    products, matmul = [], type(backend.loops).matmul

    def counted(self, *arguments):
        products.append(arguments[-1])
        return matmul(self, *arguments)

    monkeypatch.setattr(type(backend.loops), "matmul", counted)
    counts, arrays = [], [torch.asarray(rng.standard_normal((1, 4, 2048, 4))).float() for _ in range(3)]
    options = {"softcap": 3.0, "implementation": "blockwise"}
    expected = ac.scaled_dot_product_attention(*arrays, **options)
    counts.append(len(products))
    with gpu.pretended():
        found = gpu.to_host(ac.scaled_dot_product_attention(*gpu.to_device(arrays), **options))
    counts.append(len(products) - counts[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert 16 * counts[1] <= counts[0]


@pytest.mark.parametrize("name", ["plain", "mask causal", "mask offset", "mask window", "mask lengths", "softcap"])
def test_a_few_queries_wait_for_nothing(name, rng):
    check(gpu, torch, call(BLOCKS[name], rng), made(torch, rng, 1, 600))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("lengths", [0, [0, 0]], ids=["one length", "lengths"])
def test_a_cache_waits_for_nothing(lengths, donate, rng):
    def decode(move, arrays):
        query, key, value = (x.detach() for x in arrays)
        length = move(torch.asarray(lengths, dtype=torch.int32))
        cache = ac.cache.KeyValueCache(torch.zeros_like(key), torch.zeros_like(key), length)
        counts = {} if lengths == 0 else {"num_new": move(torch.asarray([2, 3], dtype=torch.int32))}
        cache = ac.cache.append(cache, key[..., :3, :], value[..., :3, :16], donate=donate, **counts)
        outputs = []
        for at in range(3, 6):
            cache = ac.cache.append(cache, key[..., at : at + 1, :], value[..., at : at + 1, :16], donate=donate)
            outputs.append(ac.scaled_dot_product_attention(query, *cache[:2], mask=ac.cache.cache_mask(cache, 1)))
        return outputs

    check(gpu, torch, decode, made(torch, rng, 1, 9))


def functions(torch):
    """Functions besides attention."""
    return {
        "rotary": lambda move, x: ac.functions.rotary_embedding(x[0], move(torch.arange(7) + 3)),
        "rotary in float64": lambda move, x: ac.functions.rotary_embedding(x[0].double(), move(torch.arange(7))),
        "reproducible": lambda move, x: ac.scaled_dot_product_attention(*x, is_causal=True, arithmetic="reproducible"),
        "reproducible rotary": lambda move, x: ac.functions.rotary_embedding(
            x[0], move(torch.arange(7)), arithmetic="reproducible"
        ),
        "pieces": lambda move, x: ac.pieces.complete_partial(
            ac.pieces.merge_partials(
                ac.pieces.partial_attention(x[0], x[1][..., :5, :], x[2][..., :5, :], mask=ac.Causal(offset=3)),
                ac.pieces.partial_attention(
                    x[0], x[1][..., 5:, :], x[2][..., 5:, :], mask=ac.Causal(offset=3), key_start=5
                ),
            )
        ),
        "weights": lambda move, x: ac.weights.attention_weights(x[0], x[1], queries=[1, 3]),
        "map": lambda move, x: ac.weights.attention_map(x[0], x[1], shape=(3, 4)),
        "scores": lambda move, x: ac.attention_scores(x[0], x[1]),
        "additive mask": lambda move, x: ac.masks.mask_from_additive(move(torch.tensor([[0.0, -math.inf]]))),
        "tokens": lambda move, x: ac.functions.sample_tokens(x[0], top_k=5, seed=3, step=move(torch.tensor(4))),
        "tokens by share": lambda move, x: ac.functions.sample_tokens(x[0], top_p=0.5, seed=3),
    }


@pytest.mark.parametrize("name", functions(None))
def test_a_function_waits_for_nothing(name, rng):
    check(gpu, torch, functions(torch)[name], made(torch, rng, 7, 11))


def modules(torch):
    """Layers, and what they are called with."""
    torch_layers = importlib.import_module("attention_torch")
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    x = torch.linspace(-1, 1, 2 * 5 * 16).reshape(2, 5, 16)
    torch.manual_seed(0)
    return {
        "attention": (torch_layers.MultiHeadAttention(16, 4), x),
        "encoder": (torch_layers.EncoderLayer(16, 4, 32).eval(), x),
        "decoder layer": (torch_layers.DecoderLayer(16, 4, 32).eval(), x),
        "decoder": (torch_layers.Decoder(50, 16, 4, 32, 2).eval(), tokens),
    }


@pytest.mark.parametrize("name", ["attention", "encoder", "decoder layer", "decoder"])
def test_a_layer_waits_for_nothing(name):
    module, x = modules(torch)[name]
    parameters = {key: tensor.detach() for key, tensor in module.state_dict().items()}

    def run(move, arrays):
        output = torch.func.functional_call(module, move(parameters), tuple(arrays))
        return output, torch.autograd.grad(output.sum(), arrays) if x.is_floating_point() else []

    check(gpu, torch, run, [x])
