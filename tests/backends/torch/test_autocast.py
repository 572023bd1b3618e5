"""Public functions under `torch.autocast`: cast once, as PyTorch's own are, and never inside."""

import functools

import numpy as np
import pytest
import torch

import attention_core as ac
from attention_core.parameters import Embeddings, FeedForward, GatedFeedForward, LayerNorm, Linear, MultiHeadAttention

DTYPES = [torch.bfloat16, torch.float16]
CALLS = {
    "auto": {},
    "dense": {"implementation": "dense"},
    "blockwise": {"implementation": "blockwise"},
    "fused": {"implementation": "fused"},
    "causal": {"is_causal": True},
    "bias": {"bias": torch.linspace(-1, 1, 40)},
    "reproducible": {"arithmetic": "reproducible"},
}
MATRIX = Linear(torch.linspace(-1, 1, 64).reshape(8, 8), torch.linspace(0, 1, 8))
NORM = LayerNorm(torch.linspace(1, 2, 8), torch.linspace(0, 1, 8))
HEADS = MultiHeadAttention(MATRIX, MATRIX, MATRIX, MATRIX)


@pytest.fixture(params=CALLS)
def options(request):
    return CALLS[request.param]


def drawn(*dims):
    return torch.from_numpy(np.random.default_rng(7).standard_normal(dims, dtype=np.float32))


def lowered(options, dtype):
    return {name: each.to(dtype) if torch.is_tensor(each) else each for name, each in options.items()}


def autocast(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_that_of_arguments_in_the_dtype_of_autocast(dtype, options):
    x = drawn(2, 3, 40, 8)
    low = x.to(dtype)
    with autocast(dtype):
        found = ac.scaled_dot_product_attention(x, low, x, **options)
        assert found.dtype == torch.nn.functional.scaled_dot_product_attention(x, low, x).dtype
    expected = ac.scaled_dot_product_attention(low, low, low, **lowered(options, dtype))
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_gradients_are_of_the_dtype_of_the_arguments(options):
    x, low = drawn(2, 3, 40, 8).requires_grad_(), drawn(2, 3, 40, 8).bfloat16().requires_grad_()
    with autocast():
        ac.scaled_dot_product_attention(x, x, x, **options).float().square().sum().backward()
    ac.scaled_dot_product_attention(low, low, low, **lowered(options, torch.bfloat16)).float().square().sum().backward()
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, low.grad.float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ["auto", "causal", "blockwise", "reproducible"])
def test_a_compiled_call_does_the_same(name):
    torch.compiler.reset()
    x = drawn(2, 3, 40, 8).requires_grad_()
    attention = functools.partial(ac.scaled_dot_product_attention, **CALLS[name])
    backend = "inductor" if name == "blockwise" else "aot_eager"
    compiled = torch.compile(lambda x: attention(x, x, x), fullgraph=True, backend=backend)
    with autocast():
        found, expected = compiled(x), attention(x, x, x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
    gradients = [torch.autograd.grad(y.float().square().sum(), x)[0] for y in (found, expected)]
    assert gradients[0].dtype == torch.float32
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.05)
    assert compiled(x).dtype == torch.float32  # outside, by another program


def test_a_backward_pass_inside_of_autocast_is_that_outside():
    x = drawn(1, 2, 300, 8)
    gradients = []
    for inside in (False, True):
        variable = x.clone().requires_grad_()
        with autocast():
            loss = (
                ac.scaled_dot_product_attention(variable, variable, variable, implementation="blockwise").float().sum()
            )
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append(variable.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("function", "peer"),
    [
        (lambda x: ac.functions.linear(MATRIX, x), torch.nn.Linear(8, 8)),
        (lambda x: ac.functions.feed_forward(FeedForward(MATRIX, MATRIX), x), torch.nn.Linear(8, 8)),
        (lambda x: ac.multi_head_attention(HEADS, x, num_heads=2), torch.nn.Linear(8, 8)),
        (lambda x: ac.attention_scores(x, x), torch.nn.Linear(8, 8)),
        (lambda x: ac.functions.gelu(x), torch.nn.GELU()),
        (lambda x: ac.functions.silu(x), torch.nn.SiLU()),
        (lambda x: ac.functions.feed_forward(GatedFeedForward(MATRIX, MATRIX, MATRIX), x), torch.nn.Linear(8, 8)),
        (lambda x: ac.functions.layer_norm(NORM, x), torch.nn.LayerNorm(8)),
        (lambda x: ac.functions.rms_norm(NORM.scale, x), torch.nn.RMSNorm(8, elementwise_affine=False)),
        (lambda x: ac.functions.rotary_embedding(x, torch.arange(5)), torch.nn.GELU()),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_return_the_dtype_of_those_of_pytorch(function, peer, dtype):
    x = drawn(2, 3, 5, 8).to(dtype)
    with autocast():
        assert function(x).dtype == peer(x).dtype


def test_what_is_not_lowered_is_computed_as_outside():
    x = drawn(2, 5, 8)
    layer = ac.parameters.EncoderLayer(HEADS, NORM, FeedForward(MATRIX, MATRIX), NORM)
    tables = Embeddings(drawn(13, 8), drawn(9, 8), None, NORM)
    calls = [
        lambda: ac.functions.encoder_layer(layer, x, num_heads=2),
        lambda: ac.functions.layer_norm(NORM, x),
        lambda: ac.functions.embed_tokens(tables, torch.arange(5)),
        lambda: ac.scaled_dot_product_attention(x.double(), x.double(), x.double()),
        lambda: ac.functions.spectral_norm(MATRIX.weight, MATRIX.bias)[0],
    ]
    for call in calls:
        with autocast():
            found = call()
        assert torch.equal(found, call())
