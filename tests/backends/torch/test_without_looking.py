"""Calls of PyTorch in which the host reads no value: as is asked for, and on an accelerator, which a CPU plays."""

import math
import threading

import numpy as np
import pytest
import torch
from call_table import Sizes, options_of
from layer_helpers import class_of
from torch_kernel_helpers import accelerator, unread

import attention_core as ac
import attention_models as models

attention = ac.scaled_dot_product_attention


def test_reading_is_an_error():
    x = torch.ones(2)
    for read in (lambda x: x.tolist(), lambda x: bool((x > 0).all()), lambda x: x.sum().item(), lambda x: x[x > 0]):
        with pytest.raises(AssertionError), unread(torch):
            read(x)
    big = torch.ones(1, 1, 300, 8)
    with pytest.raises(AssertionError), unread(torch):
        ac.scaled_dot_product_attention(big, big, big, is_causal=True)


KNOWN = ("none", "causal", "causal later", "length", "array", "bias of hidden keys", "number")


@pytest.mark.parametrize("logsumexp", [False, True])
@pytest.mark.parametrize("implementation", ["auto", "blockwise", "dense"])
@pytest.mark.parametrize("name", KNOWN)
def test_nothing_is_read_that_is_assumed_to_be_finite(name, implementation, logsumexp, put, rng):
    sizes = Sizes((1,), 4, 2, 300, 300, 8, 8)
    leaves = [x.requires_grad_() for x in put(sizes.arrays(rng))]
    options = options_of(name, sizes, put) | {"implementation": implementation, "return_logsumexp": logsumexp}
    with unread(torch, structure=True):
        result = ac.scaled_dot_product_attention(*leaves, **options, assume_finite=True)
        torch.autograd.grad((result.output if logsumexp else result).sum(), leaves)


def check(function, arrays):
    """Compare what a function makes of arrays on a host and on an accelerator."""
    expected = function([x.clone().requires_grad_(x.is_floating_point()) for x in arrays])
    with accelerator(), unread(torch):
        found = function([x.clone().requires_grad_(x.is_floating_point()) for x in arrays])
    leaves = torch.utils._pytree.tree_leaves
    pairs = [pair for pair in zip(leaves(found), leaves(expected), strict=True) if torch.is_tensor(pair[0])]
    assert pairs
    for one, other in pairs:
        np.testing.assert_allclose(one.detach(), other.detach(), rtol=1e-4, atol=3e-5)


def made(rng, queries=150, keys=261):
    dims = (2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 20)
    return [torch.asarray(rng.standard_normal(each), dtype=torch.float32) for each in dims]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("lengths", [0, [0, 0]], ids=["one length", "lengths"])
def test_an_accelerator_waits_for_no_cache(lengths, donate, rng):
    def decode(arrays):
        query, key, value = (x.detach() for x in arrays)
        length = torch.asarray(lengths, dtype=torch.int32)
        cache = ac.cache.KeyValueCache(torch.zeros_like(key), torch.zeros_like(key), length)
        counts = {} if lengths == 0 else {"num_new": torch.asarray([2, 3], dtype=torch.int32)}
        cache = ac.cache.append(cache, key[..., :3, :], value[..., :3, :16], donate=donate, **counts)
        outputs = []
        for at in range(3, 6):
            cache = ac.cache.append(cache, key[..., at : at + 1, :], value[..., at : at + 1, :16], donate=donate)
            outputs.append(attention(query, *cache[:2], mask=ac.cache.cache_mask(cache, 1)))
        return outputs

    check(decode, made(rng, 1, 9))


def by_pieces(query, key, value):
    options = {"mask": ac.Causal(offset=3)}
    first = ac.pieces.partial_attention(query, key[..., :5, :], value[..., :5, :], **options)
    second = ac.pieces.partial_attention(query, key[..., 5:, :], value[..., 5:, :], **options, key_start=5)
    return ac.pieces.merge_partials(first, second)


FUNCTIONS = {
    "rotary": lambda x: ac.functions.rotary_embedding(x[0], torch.arange(7) + 3),
    "rotary in float64": lambda x: ac.functions.rotary_embedding(x[0].double(), torch.arange(7)),
    "pieces": lambda x: by_pieces(*x),
    "weights": lambda x: ac.weights.attention_weights(x[0], x[1], queries=[1, 3]),
    "additive mask": lambda x: ac.masks.mask_from_additive(torch.tensor([[0.0, -math.inf]])),
    "tokens": lambda x: models.sample_tokens(x[0], top_k=5, seed=3, step=torch.tensor(4)),
    "tokens by share": lambda x: models.sample_tokens(x[0], top_p=0.5, seed=3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_accelerator_waits_for_no_function(name, rng):
    check(FUNCTIONS[name], made(rng, 7, 11))


@pytest.mark.parametrize(("name", "more"), [("EncoderLayer", ()), ("DecoderLayer", ()), ("Decoder", (2,))])
def test_an_accelerator_waits_for_no_layer(name, more):
    kind = class_of(name, "attention_torch")
    layer = (kind(50, 16, 4, 32, *more, seed=0) if more else kind(16, 4, 32, seed=0)).eval()
    x = torch.tensor([[1, 2, 3], [4, 5, 6]]) if more else torch.linspace(-1, 1, 160).reshape(2, 5, 16)
    check(lambda arrays: torch.autograd.grad(layer(*arrays).sum(), [*layer.parameters()]), [x])


def test_numbers_that_an_accelerator_keeps_are_those_of_a_type(backend):
    like, types = torch.empty(0, device="meta"), [torch.float32, torch.float64, torch.float32]
    first, second, third = (backend.array_of((0.5, 2.0), dtype, like) for dtype in types)
    assert (first.dtype, second.dtype, third is first) == (torch.float32, torch.float64, True)


def compiled_and_spoilt(torch):
    """A compiled call under a causal mask, whose last key has a value that is NaN."""
    query, key, value = (torch.randn(1, 2, 9, 8) for _ in range(3))
    value[..., 8, :] = math.nan
    torch._dynamo.reset()
    options = {"is_causal": True, "implementation": "dense"}
    attend = torch.compile(lambda *arrays: attention(*arrays, **options), fullgraph=True, backend="eager")
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
