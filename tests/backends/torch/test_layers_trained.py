"""Layers of PyTorch in training, under autocast, compiled, exported and extended."""

import copy
import functools
import inspect

import numpy as np
import pytest
from torch_layer_helpers import SETTINGS, attention_torch, equal, inputs_of, layer_of, torch

from attention_core import layers as definitions
from attention_numpy.trees import map_arrays


@pytest.fixture(params=SETTINGS)
def name(request):
    return request.param


@pytest.fixture
def layer(name):
    return layer_of(name)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


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


def test_autocast_brings_a_mapping_and_a_bias_along():
    layer = attention_torch.MultiHeadAttention(8, 2, seed=0)
    x, bias = torch.ones(3, 5, 8), torch.ones(5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer({"query": x, "value": x}, bias=bias)
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
    equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", [name for name in SETTINGS if "dropout" in SETTINGS[name]])
def test_training_without_dropout_leaves_the_generator_alone(name):
    layer = getattr(attention_torch, name)(**SETTINGS[name] | {"dropout": 0.0}, seed=0)
    state = torch.get_rng_state()
    layer(*inputs_of(name))
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
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    inputs = inputs_of(name)
    seed = {} if name == "SaganAttention" else {"seed": torch.tensor([3, 4])}
    found, expected = compiled(*inputs, **seed), twin(*inputs, **seed)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for parameter, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)
    for buffer, other in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(buffer, other)
    assert not torch.equal(compiled(*inputs), compiled(*inputs))
    torch.testing.assert_close(compiled.eval()(*inputs), layer(*inputs))


def test_default_compiler_draws_anew_too():
    layer, x = layer_of("FeedForward"), torch.ones(2, 3, 5)
    compiled = torch.compile(layer, fullgraph=True)
    assert not torch.equal(compiled(x), compiled(x))


@pytest.mark.parametrize("name", ["EncoderLayer", "Embeddings", "SaganAttention"])  # with all of the others
def test_layer_is_exported_in_evaluation(name, layer):
    layer.eval()
    program = torch.export.export(layer, inputs_of(name), strict=name == "Embeddings")
    torch.testing.assert_close(program.module()(*inputs_of(name)), layer(*inputs_of(name)))
    assert set(program.state_dict) == set(layer.state_dict())


def test_exported_layer_with_a_mask_is_saved(tmp_path):
    x, keep = torch.ones(2, 5, 16).cumsum(1), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    layer = attention_torch.MultiHeadAttention(16, 4, seed=0, is_causal=True).eval()
    torch.export.save(torch.export.export(layer, (x,), {"key_mask": keep}), tmp_path / "layer.pt2")
    program = torch.export.load(tmp_path / "layer.pt2").module()
    torch.testing.assert_close(program(x, key_mask=keep), layer(x, key_mask=keep))


def test_arrays_of_numpy_are_taken_in_dtypes_of_pytorch():
    layer = attention_torch.FeedForward(5, 7, seed=0)
    parameters, _ = layer.to_numpy()
    make = functools.partial(attention_torch.FeedForward.from_numpy, layer.definition)
    with pytest.raises(TypeError, match=r"expected dtype torch.float16 or .*; got torch.int8"):
        make(parameters, dtype=torch.int8)
    with pytest.raises(TypeError, match="expected a tree of NumPy arrays; got Tensor"):
        make(map_arrays(torch.from_numpy, parameters))
    with pytest.raises(TypeError, match=r"expected dtype torch.float16 or .*; got 'float32'"):
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
    with pytest.raises(TypeError, match="expected key_mask as a tensor of PyTorch; got ndarray"):
        attention(x, key_mask=np.ones(3, dtype=bool))
    with pytest.raises(TypeError, match="expected a seed as an integer or an integer array; got float"):
        layer(x, seed=1.5)
