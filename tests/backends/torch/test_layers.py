"""Layers of PyTorch: modules in its own habit, in training, under autocast, compiled, exported and extended."""

import copy
import functools
import importlib
import inspect

import numpy as np
import pytest
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch_layer_helpers import SETTINGS, attention_torch, equal, inputs_of, layer_of, torch

from attention_core import layers as definitions
from attention_core.backend import get_backend
from attention_numpy.trees import map_arrays

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
    with pytest.raises(ValueError):
        layer(x.permute(0, 2, 3, 1))


def test_text_shows_what_differs_from_the_defaults():
    layer = attention_torch.SaganAttention(16, bias=True, data_format="channels_last")
    assert layer.extra_repr() == "channels=16, bias=True, data_format='channels_last'"
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
    with pytest.raises(TypeError):
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
    with pytest.raises(TypeError):
        layer.query = torch.nn.Linear(6, 6)
    with pytest.raises(TypeError):
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
    with pytest.raises(TypeError):
        layer(x)
    if module:
        holder.remove(layer.value, "weight")
    else:
        getattr(holder, f"remove_{function}")(layer.value)
    assert layer(x).shape == x.shape


def test_autocast_lowers_the_layers_that_pytorch_lowers(name, layer):
    layer.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(*inputs_of(name))
    if found.requires_grad:
        found.float().square().mean().backward()
    for parameter in layer.parameters():
        assert parameter.grad.dtype == torch.float32
        assert bool(torch.isfinite(parameter.grad).all())
        assert bool(parameter.grad.any())
    if name in ("Embeddings", "EncoderLayer", "SaganAttention"):  # a lookup, and sums with what is given
        equal(found, layer(*inputs_of(name)))
    else:
        narrow = copy.deepcopy(layer).to(torch.bfloat16)
        equal(found, narrow(*inputs_of(name, torch.bfloat16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_leaves_float64_and_the_state_alone(name, dtype):
    layer = layer_of(name, dtype).train()
    options = {} if name == "SaganAttention" else {"seed": 5}
    twin = copy.deepcopy(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(*inputs_of(name, dtype), **options)
    expected = twin(*inputs_of(name, dtype), **options)
    if dtype == torch.float64:
        equal(found, expected)
    for one, other in zip(layer.buffers(), twin.buffers(), strict=True):
        equal(one, other)


def test_autocast_brings_a_bias_along():
    layer = attention_torch.MultiHeadAttention(8, 2, seed=0)
    x, bias = torch.ones(3, 5, 8), torch.ones(5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x, value=x, bias=bias)
        equal(found, layer(x, bias=bias))
    assert found.dtype == torch.bfloat16


@pytest.mark.parametrize("name", [name for name in SETTINGS if "dropout" in SETTINGS[name]])
def test_training_drops_by_the_seed_or_by_the_default_generator(name, layer):
    inputs = inputs_of(name)
    assert layer.training
    equal(layer(*inputs, seed=1), layer(*inputs, seed=1))
    equal(layer(*inputs, seed=2**32 + 1), layer(*inputs, seed=torch.tensor([1, 1])))
    assert not torch.equal(layer(*inputs, seed=1), layer(*inputs, seed=2))
    torch.manual_seed(4)
    first, second = layer(*inputs), layer(*inputs)
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    equal(layer(*inputs), first)
    layer.eval()
    state = torch.get_rng_state()
    layer(*inputs)
    getattr(attention_torch, name)(**SETTINGS[name] | {"dropout": 0.0}, seed=0)(*inputs)
    equal(torch.get_rng_state(), state)


def test_a_compiled_step_goes_backward_from_the_state_that_it_started_with():
    """Not from the one that it leaves behind: a compiler may compute a copy again when it goes backward."""
    layer = layer_of("SaganAttention").with_settings(arithmetic="reproducible")
    twin = copy.deepcopy(layer)
    for each in (layer, torch.compile(twin, fullgraph=True, backend="aot_eager_decomp_partition")):
        each(*inputs_of("SaganAttention")).square().sum().backward()
    for (name, one), (_, other) in zip(layer.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0, msg=name)
    for one, other in zip(layer.buffers(), twin.buffers(), strict=True):
        equal(one, other)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_layer_with_sigma_and_buffers_is_sharded_fully(dtype):
    """Parameters and inputs are cast for a call, and buffers are not."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layer, x = attention_torch.SaganAttention(8, seed=0), torch.ones(1, 8, 3, 4, requires_grad=True)
    torch.nn.init.constant_(layer.sigma, 0.5)
    whole = copy.deepcopy(layer)
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(dtype)
    expected = whole(x.to(dtype)).detach()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        output = fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))(x)
        output.sum().backward()
        torch.testing.assert_close(output, expected)
    finally:
        torch.distributed.destroy_process_group()
    for buffer, other in zip(layer.buffers(), whole.buffers(), strict=True):
        assert buffer.dtype == torch.float32
        torch.testing.assert_close(buffer, other)


def test_integer_seeds_are_compiled_for_all_at_once():
    graphs, layer, inputs = [], layer_of("Embeddings"), inputs_of("Embeddings")

    def traced(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=traced)
    for seed in (1, 2, 2**40 + 5):
        torch.testing.assert_close(compiled(*inputs, seed=seed), layer(*inputs, seed=seed))
    assert len(graphs) <= 2  # a first integer is a constant


@pytest.mark.parametrize("name", ["EncoderLayer", "SaganAttention"])  # with all others but embeddings, above
def test_layer_compiles_as_one_graph_and_draws_anew(name, layer):
    """One operation hashes a seed: its own thousand would take longer to be compiled than the layer."""
    twin, counts = copy.deepcopy(layer), []

    def counted(graph, _):
        counts.append(len(graph.graph.nodes))
        return make_boxed_func(graph.forward)

    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=counted))
    inputs = inputs_of(name)
    seed = {} if name == "SaganAttention" else {"seed": torch.tensor([3, 4])}
    found, expected = compiled(*inputs, **seed), twin(*inputs, **seed)
    assert counts[0] <= 250
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for parameter, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)
    for buffer, other in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(buffer, other)
    assert not torch.equal(compiled(*inputs), compiled(*inputs))
    torch.testing.assert_close(compiled.eval()(*inputs), layer(*inputs))


@pytest.mark.parametrize("name", ["EncoderLayer", "Embeddings", "SaganAttention"])  # with all of the others
def test_layer_is_exported_in_evaluation(name, layer):
    layer.eval()
    program = torch.export.export(layer, inputs_of(name), strict=name == "Embeddings")
    torch.testing.assert_close(program.module()(*inputs_of(name)), layer(*inputs_of(name)))
    assert set(program.state_dict) == set(layer.state_dict())


def test_arrays_of_numpy_are_taken_in_dtypes_of_pytorch():
    layer = attention_torch.FeedForward(5, 7, seed=0)
    parameters, _ = layer.to_numpy()
    make = functools.partial(attention_torch.FeedForward.from_numpy, layer.definition)
    with pytest.raises(TypeError):
        make(parameters, dtype=torch.int8)
    with pytest.raises(TypeError):
        make(map_arrays(torch.from_numpy, parameters))
    with pytest.raises(TypeError):
        attention_torch.FeedForward(8, 2, dtype="float32")


def test_a_generator_is_a_source_of_seeds():
    layer, x = attention_torch.FeedForward(5, 7, dropout=0.5, seed=0).train(), torch.ones(4, 5)
    source, same = (torch.Generator().manual_seed(3) for _ in range(2))
    seeds = [attention_torch.backend.draw_seed(same) for _ in range(2)]
    found = [layer(x, seed=source) for _ in range(2)]
    for each, seed in zip(found, seeds, strict=True):
        equal(each, layer(x, seed=seed))
    assert not torch.equal(*found)


def test_subclass_of_a_user_keeps_its_own_constructor():
    class Causal(attention_torch.MultiHeadAttention):
        def __init__(self, channels, *, heads):
            super().__init__(channels, heads, is_causal=True)

    assert list(inspect.signature(Causal).parameters) == ["channels", "heads"]
    assert Causal(8, heads=2).definition == definitions.MultiHeadAttention(8, 2, is_causal=True)


def test_what_is_of_numpy_is_named_or_taken():
    """Its integers are seeds; its arrays are no tensors."""
    layer = attention_torch.FeedForward(4, 8, dropout=0.5, seed=np.int64(3))
    x = torch.ones(3, 4)
    assert torch.equal(layer.expand.weight, attention_torch.FeedForward(4, 8, seed=3).expand.weight)
    assert torch.equal(layer(x, seed=np.int64(5)), layer(x, seed=5))
    attention = attention_torch.MultiHeadAttention(4, 2)
    with pytest.raises(TypeError):
        attention(x, key_mask=np.ones(3, dtype=bool))
    with pytest.raises(TypeError):
        layer(x, seed=1.5)
