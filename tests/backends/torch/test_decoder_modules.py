"""The decoder and its parts as modules: names, values, files, caches and gradients."""

import functools

import numpy as np
import pytest
import torch

import attention_torch
from attention_core import layers

SIZES = {"num_tokens": 11, "channels": 8, "num_heads": 2, "inner": 6, "num_layers": 2, "num_key_value_heads": 1}
IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])


@pytest.fixture
def model():
    return attention_torch.Decoder(**SIZES, query_key_norm=True, dropout=0.2, seed=3)


def test_a_decoder_has_the_names_and_values_of_its_definition(model, tmp_path):
    definition = layers.Decoder(**SIZES, query_key_norm=True, dropout=0.2)
    assert model.definition == definition
    start = layers.named_arrays(definition.init(3, xp=np))
    assert set(model.state_dict()) == set(start)
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), start[name])
    expected = definition(model.read(), IDS)
    torch.testing.assert_close(model.eval()(IDS), expected, rtol=0, atol=0)
    attention_torch.save(model, tmp_path / "a.safetensors")
    again = attention_torch.load(tmp_path / "a.safetensors", arithmetic="reproducible")
    assert isinstance(again, attention_torch.Decoder)
    torch.testing.assert_close(again.eval()(IDS), expected, rtol=0, atol=1e-5)
    assert len(list(model.layers.children())) == 2


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


def test_parts_of_a_decoder_are_their_definitions():
    x = torch.randn(2, 3, 8)
    for layer in (
        attention_torch.RMSNorm(8),
        attention_torch.GatedFeedForward(8, 6, seed=1),
        attention_torch.DecoderLayer(8, 2, 6, seed=1, post_norm=True),
    ):
        torch.testing.assert_close(layer(x), layer.definition(layer.read(), x), rtol=0, atol=0)


def test_every_option_reaches_the_definition():
    options = {
        "position_ids": torch.tensor([[0, 1, 2, 3], [2, 3, 4, 5]]),
        "mask": ~torch.eye(4, dtype=torch.bool).roll(1, 1),
        "key_mask": torch.tensor([[True, True, False, True], [True, True, True, True]]),
        "memory_mask": torch.tensor([[[True, False, True]], [[True, True, False]]]),
    }
    layer = attention_torch.DecoderLayer(8, 2, 6, memory_channels=5, seed=1)
    model = attention_torch.Decoder(**SIZES, memory_channels=5, seed=3)
    memory = torch.randn(2, 3, 5)
    for module, x, more in ((layer, torch.randn(2, 4, 8), {}), (model, IDS, {"select": torch.tensor([1, 3])})):
        chosen = options | more
        found = module(x, memory=memory, **chosen)
        expected = module.definition(module.read(), x, memory=memory, **chosen)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for name in chosen:
            other = module(x, memory=memory, **{key: value for key, value in chosen.items() if key != name})
            assert other.shape != found.shape or not torch.equal(other, found)
