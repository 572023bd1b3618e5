"""The decoder and its parts as modules: names, values, files, caches and gradients."""

import functools

import pytest
import torch

import attention_torch

SIZES = {"num_tokens": 11, "channels": 8, "num_heads": 2, "inner": 6, "num_layers": 1, "num_key_value_heads": 1}
IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])


@pytest.fixture
def model():
    return attention_torch.Decoder(**SIZES, query_key_norm=True, dropout=0.2, seed=3)


@pytest.mark.parametrize("call", [lambda f: f, functools.partial(torch.compile, fullgraph=True, backend="aot_eager")])
def test_a_decoder_takes_a_cache(model, call):
    """Eager, and compiled as one graph."""
    whole, step = model.eval()(IDS), call(model)
    cache = model.definition.empty_cache((2,), 5, xp=torch)
    with torch.no_grad():
        first, cache = step(IDS[:, :2], cache=cache)
        second, cache = step(IDS[:, 2:], cache=cache)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    assert int(cache.length) == 4


@pytest.mark.parametrize("arithmetic", ["fast", "reproducible"])
def test_a_decoder_is_trained(arithmetic):
    model = attention_torch.Decoder(**SIZES, dropout=0.1, arithmetic=arithmetic, seed=3)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.2), []
    for seed in range(4):
        loss = torch.nn.functional.cross_entropy(model(IDS[:, :-1], seed=seed).flatten(0, 1), IDS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
