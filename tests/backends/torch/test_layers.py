"""The layers of PyTorch: modules in its own habit, which compute what their definitions say and nothing else."""

import copy
import functools
import importlib
import inspect

import pytest
from torch_layer_helpers import SETTINGS, attention_torch, equal, inputs_of, layer_of, torch

from attention_core.backend import get_backend

parametrize = torch.nn.utils.parametrize


@pytest.fixture(params=SETTINGS)
def name(request):
    return request.param


@pytest.fixture
def layer(name):
    return layer_of(name)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def test_feature_maps_have_the_layout_of_convolutions():
    x = torch.linspace(-1, 1, 2 * 8 * 4 * 6).reshape(2, 8, 4, 6)
    layer = attention_torch.SaganAttention(8, head_channels=2, seed=0).eval()
    last = attention_torch.SaganAttention(8, head_channels=2, seed=0, data_format="channels_last").eval()
    with torch.no_grad():
        layer.sigma.fill_(0.7)
        last.sigma.fill_(0.7)
        torch.testing.assert_close(layer(x), last(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
    assert inspect.signature(attention_torch.SaganAttention).parameters["data_format"].default == "channels_first"
    by_position = attention_torch.SaganAttention(8, 2, None, True, None, False, True, True, "channels_last")
    assert by_position.definition.data_format == "channels_last"
    with pytest.raises(ValueError, match=r"8 channels at axis -3; .*: it has them with data_format='channels_last'"):
        layer(x.permute(0, 2, 3, 1))


def test_text_shows_what_differs_from_the_defaults():
    layer = attention_torch.SaganAttention(16, bias=True, data_format="channels_last")
    assert layer.extra_repr() == "channels=16, bias=True, data_format='channels_last'"
    assert repr(attention_torch.DotProductAttention()) == "DotProductAttention()"
    assert "(state): SpectralVectors(theta=(2,), phi=(2,), g=(8,), output=(16,))" in repr(layer)


def test_default_generator_governs_first_values_without_a_seed():
    def made(seed):
        torch.manual_seed(seed)
        return attention_torch.MultiHeadAttention(6, 2).query.weight.detach()

    equal(made(1), made(1))
    assert not torch.equal(made(1), made(2))
    layer = attention_torch.MultiHeadAttention(6, 2)
    before = layer.query.weight.detach().clone()
    layer.reset_parameters()
    assert not torch.equal(layer.query.weight, before)


def test_default_dtype_and_device_are_those_of_pytorch(name):
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            layer = getattr(attention_torch, name)(**SETTINGS[name])
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(tensor.is_meta and tensor.dtype == torch.float64 for tensor in layer.state_dict().values())


def test_layer_without_values_is_filled_later(name, layer):
    empty = getattr(attention_torch, name)(**SETTINGS[name], device="meta")
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    assert empty(*(x.to("meta") for x in inputs_of(name))).shape == layer(*inputs_of(name)).shape
    away = attention_torch.Layer.from_numpy(layer.definition, *layer.to_numpy(), device="meta")
    assert all(tensor.is_meta for tensor in away.state_dict().values())
    empty.to_empty(device="cpu").reset_parameters(3)
    layer.reset_parameters(3)
    equal(empty.eval()(*inputs_of(name)), layer.eval()(*inputs_of(name)))


def test_a_copy_with_other_settings_has_tensors_of_its_own():
    layer = attention_torch.FeedForward(5, 7, seed=0)
    assert layer.with_settings(arithmetic="reproducible").expand.weight is not layer.expand.weight
    parameters, _ = layer.to_numpy()
    again = attention_torch.FeedForward.from_numpy(layer.definition, parameters)
    parameters.expand.weight[:] = 9
    assert max(each.expand.weight.max() for each in (layer, again)) < 9
    sagan = attention_torch.SaganAttention(8)
    sagan.output = attention_torch.SaganAttention(8).output  # a branch of the parameters, and the name of a setting


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_modules_of_an_encoder_call_their_hooks(norm_first):
    """With inputs and outputs, which a hook may change; nothing else changes."""
    layer = attention_torch.EncoderLayer(6, 2, 10, norm_first=norm_first, seed=3).eval()
    x, called = torch.randn(2, 3, 6), []
    plain = layer(x)
    for name in ("attention_norm", "attention", "feed_forward_norm", "feed_forward"):
        module = getattr(layer, name)
        module.register_forward_pre_hook(lambda module, inputs, name=name: called.append((name, inputs[0].shape)))
    torch.testing.assert_close(layer(x), plain, rtol=0, atol=0)
    assert sorted(called) == sorted((name, x.shape) for name in layer.definition.parameters._fields)
    weights = []
    layer.attention.register_forward_hook(lambda module, inputs, result: weights.append(result.weights))
    result = layer(x, return_weights=True)
    assert result.weights is weights[0]
    torch.testing.assert_close(result.output, plain, rtol=0, atol=1e-6)
    again = copy.deepcopy(layer)
    again.attention.register_forward_hook(lambda module, inputs, result: result._replace(output=0 * result.output))
    assert not torch.equal(again(x, return_weights=True).output, plain)


def note(called, name, part, inputs, output):
    called.append((name, output.shape))


def test_the_modules_of_decoders_call_their_hooks():
    layer = attention_torch.DecoderLayer(8, 2, 10, post_norm=True, memory_channels=7, seed=3).eval()
    model = importlib.import_module("attention_models.torch").Decoder(11, 8, 2, 10, num_layers=2, seed=3).eval()
    memory, ids = torch.randn(2, 4, 7), torch.tensor([[1, 2, 3]])
    cache = model.definition.empty_cache((1,), 3, xp=get_backend("torch").namespace)
    for module, call, names in (
        (layer, lambda: layer(torch.ones(2, 3, 8), memory=memory), ["attention", "cross_attention", "feed_forward"]),
        (model, lambda: model(ids, cache=cache)[0], ["layers.0", "layers.0.attention", "layers.1.feed_forward"]),
    ):
        plain, called = call(), []
        for name in names:
            part = module.get_submodule(name)
            part.register_forward_hook(functools.partial(note, called, name))
        assert torch.equal(call(), plain)
        assert sorted(called) == [(name, (*plain.shape[:2], 8)) for name in names]
        handle = module.get_submodule(names[-1]).register_forward_hook(lambda part, inputs, output: 0 * output)
        assert not torch.equal(call(), plain)
        handle.remove()
    with pytest.raises(TypeError, match=r"expected the result of hook for layers.0 as an array; got NoneType"):
        model(ids, hook=lambda name, function, h: None)


class LowRank(torch.nn.Module):
    """A weight with a product of two matrices of one column, which begins as 0."""

    def __init__(self, weight):
        super().__init__()
        self.down = torch.nn.Parameter(torch.ones(weight.shape[0], 1))
        self.up = torch.nn.Parameter(torch.zeros(1, weight.shape[1]))

    def forward(self, weight):
        return weight + self.down @ self.up


def test_projections_take_low_rank_changes_and_are_called_alone():
    """By parametrizations of PyTorch, trained alone, then merged into weights of the same names."""
    layer, x = attention_torch.MultiHeadAttention(6, 2, seed=3), torch.randn(2, 3, 6)
    names, plain = list(layer.state_dict()), layer(x)
    torch.testing.assert_close(layer.query(x), x @ layer.query.weight + layer.query.bias)
    with pytest.raises(TypeError, match=r"expected query as Linear of attention_torch, .*; got Linear: .*parametrize"):
        layer.query = torch.nn.Linear(6, 6)
    with pytest.raises(TypeError, match="expected a call of the layer that holds MultiHeadAttention; got one of"):
        attention_torch.EncoderLayer(6, 2, 8).attention(x)
    layer.requires_grad_(False)
    parametrize.register_parametrization(layer.query, "weight", LowRank(layer.query.weight))
    assert torch.equal(layer(x), plain)
    optimizer = torch.optim.SGD([each for each in layer.parameters() if each.requires_grad], 1.0)
    layer(x).square().sum().backward()
    optimizer.step()
    tuned = layer(x)
    assert len(optimizer.param_groups[0]["params"]) == 2
    assert not torch.equal(tuned, plain)
    parametrize.remove_parametrizations(layer.query, "weight")
    assert sorted(layer.state_dict()) == sorted(names)
    torch.testing.assert_close(layer(x), tuned)
    attention_torch.Layer.from_numpy(layer.definition, *layer.to_numpy())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "prune.l1_unstructured"])
def test_hooks_that_would_change_tensors_too_late_are_told(name):
    """A layer reads its tensors before its parts are called, which is when these hooks write them."""
    utils, (module, _, function) = torch.nn.utils, name.rpartition(".")
    importlib.import_module("torch.nn.utils.prune")
    layer, x = attention_torch.MultiHeadAttention(8, 2), torch.randn(1, 3, 8)
    holder = utils.prune if module else utils
    getattr(holder, function)(layer.value, "weight", **({"amount": 0.5} if module else {}))
    with pytest.raises(
        TypeError, match=r"expected tensors of Linear that torch.nn.utils.parametrize changes; got a hook"
    ):
        layer(x)
    if module:
        holder.remove(layer.value, "weight")
    else:
        getattr(holder, f"remove_{function}")(layer.value)
    assert layer(x).shape == x.shape
