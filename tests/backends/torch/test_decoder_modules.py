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
