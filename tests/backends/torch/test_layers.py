"""The layers of PyTorch: modules in its own habit, which compute what their definitions say and nothing else."""

import copy
import doctest
import importlib
import inspect
import io
import pickle

import numpy as np
import pytest

from attention_core import layers as definitions
from attention_core.layers import named_arrays
from attention_numpy.trees import map_arrays

torch = importlib.import_module("torch")
attention_torch = importlib.import_module("attention_torch")

SETTINGS = {
    "DotProductAttention": {"dropout": 0.3},
    "MultiHeadAttention": {"channels": 8, "num_heads": 4, "num_key_value_heads": 2, "key_channels": 5, "dropout": 0.3},
    "FeedForward": {"channels": 5, "inner": 7, "output_channels": 3, "dropout": 0.3},
    "EncoderLayer": {"channels": 6, "num_heads": 2, "inner": 10, "dropout": 0.3},
    "Embeddings": {"num_tokens": 11, "num_positions": 7, "channels": 4, "num_segments": 3, "dropout": 0.3},
    "SaganAttention": {"channels": 8, "head_channels": 2, "bias": True},
}
SHAPES = {
    "DotProductAttention": ((2, 3, 4), (2, 5, 4), (2, 5, 6)),
    "MultiHeadAttention": ((2, 3, 8), (2, 6, 5)),
    "FeedForward": ((2, 3, 5),),
    "EncoderLayer": ((2, 3, 6),),
    "SaganAttention": ((2, 4, 6, 8),),
}
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def values_of(name):
    """The inputs of a layer in NumPy."""
    rng = np.random.default_rng(5)
    if name == "Embeddings":
        return (rng.integers(0, 11, (2, 5)),)
    return tuple(rng.standard_normal(shape) for shape in SHAPES[name])


def inputs_of(name, dtype=torch.float32):
    arrays = map(torch.from_numpy, values_of(name))
    return tuple(array.to(dtype) if array.is_floating_point() else array for array in arrays)


def layer_of(name, dtype=torch.float32, **options):
    """A layer in which nothing is 0, so that everything has an effect and a gradient."""
    layer = getattr(attention_torch, name)(**SETTINGS[name], **options, dtype=dtype, seed=3)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim < 2:
                parameter += torch.rand(parameter.shape, generator=generator, dtype=torch.float64) / 2 + 0.25
    return layer


def equal(found, expected):
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def same_bits(trees, others):
    for tree, other in zip(trees, others, strict=True):
        first, second = named_arrays(tree), named_arrays(other)
        assert list(first) == list(second)
        for name, array in first.items():
            assert (array.dtype, array.shape) == (second[name].dtype, second[name].shape), name
            assert array.tobytes() == second[name].tobytes(), name


@pytest.fixture(params=SETTINGS)
def name(request):
    return request.param


@pytest.fixture
def layer(name):
    return layer_of(name)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def test_constructor_shows_the_settings_and_the_habit_of_pytorch(name):
    kind, definition = getattr(attention_torch, name), getattr(definitions, name)
    shown = inspect.signature(kind).parameters
    assert list(shown) == [*inspect.signature(definition).parameters, "device", "dtype", "seed"]
    for each, parameter in inspect.signature(definition).parameters.items():
        assert (shown[each].kind, shown[each].default) == (parameter.kind, parameter.default)
    assert kind(**SETTINGS[name]).definition == definition(**SETTINGS[name])


def test_call_takes_what_the_definition_takes(name, layer):
    of_definition = inspect.signature(type(layer.definition).__call__).parameters
    expected = {
        each: p.default for each, p in of_definition.items() if each not in ("self", "parameters", "state", "xp")
    }
    assert {each: p.default for each, p in inspect.signature(layer.forward).parameters.items()} == expected


def test_settings_go_by_position_and_by_name():
    by_position = attention_torch.FeedForward(5, 7, 3, False, device="cpu").definition
    assert by_position == attention_torch.FeedForward(5, bias=False, inner=7, output_channels=3).definition
    assert by_position == definitions.FeedForward(5, 7, 3, bias=False)


def test_tensors_have_the_names_and_shapes_of_the_definition(name, layer):
    parameters, state = named_arrays(layer.definition.parameters), named_arrays(layer.definition.state, "state")
    assert {key: tuple(value.shape) for key, value in layer.state_dict().items()} == {
        key: initial.dims for key, initial in (parameters | state).items()
    }
    found = dict(layer.named_parameters())
    assert set(found) == set(parameters)
    assert all(type(parameter) is torch.nn.Parameter and parameter.requires_grad for parameter in found.values())
    assert [key for key, _ in layer.named_buffers()] == list(state)


def test_names_have_dots_and_weights_are_in_out():
    layer = attention_torch.EncoderLayer(6, 2, 10)
    assert layer.feed_forward.expand.weight.shape == (6, 10)
    assert layer.get_parameter("attention.query.weight") is layer.attention.query.weight
    learned = attention_torch.MultiHeadAttention(6, 2, output=False, extra_key_value=True)
    assert "extra_key" in dict(learned.named_parameters())
    assert learned.output is None


def test_text_shows_what_differs_from_the_defaults():
    layer = attention_torch.SaganAttention(16, bias=True, data_format="channels_first")
    assert layer.extra_repr() == "channels=16, bias=True, data_format='channels_first'"
    assert repr(attention_torch.DotProductAttention()) == "DotProductAttention()"
    assert "(state): SpectralVectors(theta=(2,), phi=(2,), g=(8,), output=(16,))" in repr(layer)


@pytest.mark.parametrize("training", [False, True])
def test_layer_computes_what_its_definition_says_in_numpy(name, training):
    layer = layer_of(name, torch.float64).train(training)
    parameters, state = layer.to_numpy()
    options = {"state": state} if state else {}
    seeded = {"seed": 11} if training and name != "SaganAttention" else {}
    expected = layer.definition(parameters, *values_of(name), **options, **seeded)
    found = layer(*inputs_of(name, torch.float64), **seeded)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_first_values_are_the_same_bits_as_elsewhere(name, dtype):
    import attention_numpy

    layer = getattr(attention_torch, name)(**SETTINGS[name], dtype=getattr(torch, dtype), seed=2**40 + 3)
    if dtype in attention_numpy.backend.dtypes and dtype != "bfloat16":
        options = {"xp": attention_numpy.backend.namespace, "dtype": dtype}
        expected = layer.definition.init(2**40 + 3, **options), layer.definition.init_state(2**40 + 3, **options)
        same_bits(layer.to_numpy(), expected)
    assert {str(tensor.dtype) for tensor in layer.state_dict().values()} <= {f"torch.{dtype}"}


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


def test_resetting_gives_the_values_of_a_new_layer(name, layer):
    layer.reset_parameters(3)
    same_bits(layer.to_numpy(), getattr(attention_torch, name)(**SETTINGS[name], seed=3).to_numpy())


def test_layer_without_values_is_filled_later(name, layer):
    empty = getattr(attention_torch, name)(**SETTINGS[name], device="meta")
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    assert empty(*(x.to("meta") for x in inputs_of(name))).shape == layer(*inputs_of(name)).shape
    empty.to_empty(device="cpu").reset_parameters(3)
    layer.reset_parameters(3)
    equal(empty.eval()(*inputs_of(name)), layer.eval()(*inputs_of(name)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_go_to_numpy_and_back_bit_for_bit(name, dtype):
    layer = layer_of(name, getattr(torch, dtype))
    trees = layer.to_numpy()
    for base in (attention_torch.Layer, type(layer)):
        again = base.from_numpy(layer.definition, *trees)
        assert type(again) is type(layer)
        assert again.definition == layer.definition
        same_bits(again.to_numpy(), trees)
    equal(again.eval()(*inputs_of(name, getattr(torch, dtype))), layer.eval()(*inputs_of(name, getattr(torch, dtype))))


def test_arrays_share_no_memory_with_the_layer():
    layer = attention_torch.FeedForward(5, 7, seed=0)
    parameters, _ = layer.to_numpy()
    again = attention_torch.FeedForward.from_numpy(layer.definition, parameters)
    parameters.expand.weight[:] = 9
    assert layer.expand.weight.detach().max() < 9
    assert again.expand.weight.detach().max() < 9


def test_arrays_come_in_another_dtype_and_place(name, layer):
    again = attention_torch.Layer.from_numpy(layer.definition, *layer.to_numpy(), dtype=torch.bfloat16)
    for tensor, expected in zip(again.state_dict().values(), layer.state_dict().values(), strict=True):
        equal(tensor, expected.to(torch.bfloat16))
    away = attention_torch.Layer.from_numpy(layer.definition, *layer.to_numpy(), device="meta")
    assert all(tensor.is_meta for tensor in away.state_dict().values())


def test_arrays_that_do_not_fit_are_named():
    layer = attention_torch.SaganAttention(8, seed=0)
    parameters, state = layer.to_numpy()
    make = attention_torch.SaganAttention.from_numpy
    definition, other = layer.definition, definitions.FeedForward(5, 7)
    wrong = parameters._replace(g=parameters.g._replace(weight=np.ones((8, 3), np.float32)))
    for call, error, message in (
        (lambda: make(other, parameters), TypeError, "expected a definition of SaganAttention; got FeedForward"),
        (lambda: attention_torch.Layer.from_numpy(3, parameters), TypeError, "definition of DotProductAttention or .*; got int"),
        (lambda: make(definition, wrong, state), ValueError, r"expected parameters.g.weight \(8, 4\); got \(8, 3\)"),
        (lambda: make(definition, parameters), TypeError, "expected state as SpectralVectors; got tuple"),
        (lambda: make(definition, parameters._replace(output=None), state), TypeError, "expected parameters.output as Linear; got NoneType"),
        (lambda: make(definition, parameters, state, dtype=torch.int8), TypeError, "expected dtype torch.float16 or .*; got torch.int8"),
        (lambda: make(definition, map_arrays(torch.from_numpy, parameters), state), TypeError, "expected a tree of NumPy arrays; got Tensor"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_hold_a_layer_bit_for_bit(name, dtype, tmp_path):
    layer = layer_of(name, getattr(torch, dtype))
    attention_torch.save(layer, tmp_path / "layer.safetensors")
    again = attention_torch.load(tmp_path / "layer.safetensors")
    assert type(again) is type(layer)
    assert again.definition == layer.definition
    same_bits(again.to_numpy(), layer.to_numpy())
    cast = attention_torch.load(tmp_path / "layer.safetensors", device="meta", dtype=torch.float64)
    assert all(tensor.is_meta and tensor.dtype == torch.float64 for tensor in cast.state_dict().values())


def test_only_layers_are_saved(tmp_path):
    with pytest.raises(TypeError, match=r"expected a layer of attention_torch; got Linear"):
        attention_torch.save(torch.nn.Linear(2, 3), tmp_path / "layer.safetensors")


def test_copies_and_pickles_are_the_same_layer(name, layer):
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    layer.eval()
    expected = layer(*inputs_of(name))
    for again in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(stream, weights_only=False).eval(),
    ):
        assert again.definition == layer.definition
        equal(again(*inputs_of(name)), expected)
        for tensor, original in zip(again.parameters(), layer.parameters(), strict=True):
            assert tensor.data_ptr() != original.data_ptr()


def test_values_go_through_a_state_dict_and_a_file_of_it(name, layer):
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    for state in (layer.state_dict(), pickle.loads(pickle.dumps(layer.state_dict())), loaded):
        other = getattr(attention_torch, name)(**SETTINGS[name], seed=8)
        other.load_state_dict(state)
        same_bits(other.to_numpy(), layer.to_numpy())


def test_other_dtypes_and_devices_are_moved_to(name, layer):
    layer.eval()
    expected = layer(*inputs_of(name))
    wide = copy.deepcopy(layer).to(torch.float64)
    found = wide(*inputs_of(name, torch.float64))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), layer(*inputs_of(name)), rtol=0, atol=1e-5)
    away = copy.deepcopy(layer).to("meta")
    assert away(*(x.to("meta") for x in inputs_of(name))).shape == expected.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_computed_in_float32_and_rounded_once(name, dtype):
    narrow = layer_of(name, dtype).eval()
    wide = copy.deepcopy(narrow).to(torch.float32)
    if name == "SaganAttention":  # its normalized kernels have the dtype of the kernels
        narrow.definition = wide.definition = definitions.SaganAttention(
            8, head_channels=2, bias=True, spectral_norm=False
        )
        narrow.state = wide.state = None
    inputs = inputs_of(name, dtype)
    widened = (x.float() if x.is_floating_point() else x for x in inputs)
    equal(narrow(*inputs), wide(*widened).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_all_dtypes_are_trained(name, dtype):
    layer = layer_of(name, dtype)
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs_of(name, dtype)]
    layer(*inputs).square().mean().backward()
    for tensor in (*layer.parameters(), *(x for x in inputs if x.requires_grad)):
        assert tensor.grad.dtype == dtype
        assert bool(torch.isfinite(tensor.grad).all())


def test_autocast_computes_as_with_parameters_of_its_dtype(name, layer):
    layer.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(*inputs_of(name))
    if found.requires_grad:
        found.float().square().mean().backward()
    for parameter in layer.parameters():
        assert parameter.grad.dtype == torch.float32
        assert bool(torch.isfinite(parameter.grad).all())
        assert bool(parameter.grad.any())
    if name == "Embeddings":  # ids are of no dtype to cast from, as with torch.nn.Embedding
        equal(found, layer(*inputs_of(name)))
    else:
        narrow = copy.deepcopy(layer).to(torch.bfloat16)
        equal(found, narrow(*inputs_of(name, torch.bfloat16)))


def test_autocast_trains_and_leaves_float64_alone(name):
    layer = layer_of(name, torch.float64).train()
    options = {} if name == "SaganAttention" else {"seed": 5}
    twin = copy.deepcopy(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(*inputs_of(name, torch.float64), **options)
    equal(found, twin(*inputs_of(name, torch.float64), **options))


def test_autocast_keeps_the_state_wide():
    layer = layer_of("SaganAttention")
    twin = copy.deepcopy(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(*inputs_of("SaganAttention"))
    twin(*inputs_of("SaganAttention"))
    for (_, found), (_, expected) in zip(layer.named_buffers(), twin.named_buffers(), strict=True):
        equal(found, expected)


def test_autocast_brings_a_mapping_and_a_bias_along():
    layer = attention_torch.MultiHeadAttention(8, 2, seed=0)
    x, bias = torch.ones(3, 5, 8), torch.ones(5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer({"query": x, "value": x}, bias=bias)
        equal(found, layer(x, bias=bias))
    assert found.dtype == torch.bfloat16


def test_nothing_is_dropped_in_evaluation(name, layer):
    plain = {key: value for key, value in SETTINGS[name].items() if key != "dropout"}
    other = getattr(attention_torch, name)(**plain)
    other.load_state_dict(layer.state_dict())
    layer.eval(), other.eval()
    equal(layer(*inputs_of(name)), other(*inputs_of(name)))
    if name != "SaganAttention":
        equal(layer(*inputs_of(name), seed=1), other(*inputs_of(name)))


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_compiled_step_goes_backward_from_the_state_that_it_started_with(dtype):
    """Not from the one that it leaves behind: a compiler may compute a copy again when it goes backward."""
    arithmetic = "fast" if dtype == torch.float64 else "reproducible"
    layer = attention_torch.SaganAttention(8, head_channels=2, seed=0, arithmetic=arithmetic).to(dtype).train()
    with torch.no_grad():
        layer.sigma.fill_(0.7)  # 0 lets no gradient through
    twin = copy.deepcopy(layer)
    for each in (layer, torch.compile(twin, fullgraph=True)):
        each(*inputs_of("SaganAttention", dtype)).square().sum().backward()
    close = 1e-12 if dtype == torch.float64 else 0
    for held in ("named_parameters", "named_buffers"):
        for (name, one), (_, other) in zip(getattr(layer, held)(), getattr(twin, held)(), strict=True):
            pair = (one.grad, other.grad) if held == "named_parameters" else (one, other)
            torch.testing.assert_close(*pair, rtol=close, atol=close, msg=name)


def test_power_iteration_advances_in_training_alone():
    layer, inputs = layer_of("SaganAttention", torch.float64), inputs_of("SaganAttention", torch.float64)
    parameters, before = layer.to_numpy()
    layer.eval()
    expected = layer(*inputs)
    same_bits([layer.to_numpy()[1]], [before])
    layer.train()
    places = [buffer.data_ptr() for buffer in layer.buffers()]
    found = layer(*inputs)
    equal(found, expected)  # which takes the step too, but does not keep it
    after = named_arrays(layer.to_numpy()[1])
    for name, vector in named_arrays(layer.definition.refreshed(parameters, before)).items():
        np.testing.assert_allclose(after[name], vector, rtol=0, atol=1e-14)
        assert not np.allclose(after[name], named_arrays(before)[name], rtol=0, atol=1e-3)
    assert [buffer.data_ptr() for buffer in layer.buffers()] == places
    assert not any(buffer.requires_grad for buffer in layer.buffers())
    wanted = torch.autograd.grad(expected.sum(), [*layer.parameters()])
    for gradient, other in zip(torch.autograd.grad(found.sum(), [*layer.parameters()]), wanted, strict=True):
        equal(gradient, other)
    with torch.no_grad():
        for _ in range(60):
            layer(*inputs)
    kernel = layer.theta.weight.detach()
    sigma = torch.linalg.vector_norm(kernel @ layer.state.theta)
    torch.testing.assert_close(sigma, torch.linalg.matrix_norm(kernel, 2), rtol=0, atol=1e-6)


def test_gradients_are_those_of_finite_differences(name):
    layer = layer_of(name, torch.float64).eval()
    names = [each for each, _ in layer.named_parameters()]
    inputs = inputs_of(name, torch.float64)
    moving = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    parameters = [parameter.detach().clone().requires_grad_() for parameter in layer.parameters()]

    def call(*tensors):
        parameters = dict(zip(names, tensors[len(moving) :], strict=True))
        return torch.func.functional_call(layer, parameters, tensors[: len(moving)] or inputs)

    assert torch.autograd.gradcheck(call, (*moving, *parameters))


def test_gradients_reach_all_parameters(name, layer):
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs_of(name)]
    layer(*inputs).square().sum().backward()
    assert all(bool(x.grad.any()) for x in inputs if x.requires_grad)
    for key, parameter in layer.named_parameters():
        assert bool(parameter.grad.any()) or key == "key.bias", key  # which moves all scores of a query alike


def test_learned_key_and_value_have_names_and_gradients():
    layer = attention_torch.MultiHeadAttention(6, 2, extra_key_value=True, zero_attention=True, seed=0)
    layer(torch.linspace(-1, 1, 60).reshape(2, 5, 6)).square().sum().backward()
    assert bool(layer.extra_key.grad.any())
    assert bool(layer.extra_value.grad.any())


def test_functional_call_takes_the_tensors_it_is_given(name, layer):
    layer.eval()
    other = layer_of(name)
    other.reset_parameters(9)
    found = torch.func.functional_call(layer, other.state_dict(), inputs_of(name))
    equal(found, other.eval()(*inputs_of(name)))


def test_tensors_may_be_tied_and_parametrized():
    layer = attention_torch.MultiHeadAttention(8, 2, seed=0)
    layer.key.weight = layer.query.weight
    x = torch.linspace(-1, 1, 48).reshape(2, 3, 8)
    parameters = layer.read()
    equal(layer(x), layer.definition(parameters._replace(key=parameters.key._replace(weight=layer.query.weight)), x))
    twice = copy.deepcopy(layer)
    torch.nn.utils.parametrize.register_parametrization(twice.value, "weight", Doubled())
    equal(
        twice(x),
        layer.definition(parameters._replace(value=parameters.value._replace(weight=2 * layer.value.weight)), x),
    )


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "SaganAttention"])
def test_integer_seeds_are_compiled_for_all_at_once(name, layer):
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in (1, 2, 2**31 + 3, 2**40 + 5):
        torch.testing.assert_close(compiled(*inputs_of(name), seed=seed), layer(*inputs_of(name), seed=seed))


def test_layer_compiles_as_one_graph_in_evaluation(name, layer):
    layer.eval()
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs_of(name)), layer(*inputs_of(name)))


def test_layer_compiles_as_one_graph_in_training_and_draws_anew(name, layer):
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    inputs = inputs_of(name)
    seed = {} if name == "SaganAttention" else {"seed": torch.tensor([3, 4])}
    found, expected = compiled(*inputs, **seed), twin(*inputs, **seed)
    torch.testing.assert_close(found, expected)
    if found.requires_grad:
        found.square().sum().backward()
        expected.square().sum().backward()
    for parameter, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)
    for buffer, other in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(buffer, other)
    assert not torch.equal(compiled(*inputs), compiled(*inputs))


def test_default_compiler_draws_anew_too():
    layer, x = layer_of("FeedForward"), torch.ones(2, 3, 5)
    compiled = torch.compile(layer, fullgraph=True)
    assert not torch.equal(compiled(x), compiled(x))


@pytest.mark.parametrize("strict", [False, True])
def test_layer_is_exported_in_evaluation(name, layer, strict):
    layer.eval()
    program = torch.export.export(layer, inputs_of(name), strict=strict)
    torch.testing.assert_close(program.module()(*inputs_of(name)), layer(*inputs_of(name)))
    assert set(program.state_dict) == set(layer.state_dict())


def test_options_and_mappings_reach_the_definition():
    layer = attention_torch.MultiHeadAttention(8, 2, seed=0)
    x, keep = torch.linspace(-1, 1, 80).reshape(2, 5, 8), torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]) > 0
    options = {
        "key_mask": keep,
        "query_mask": keep,
        "bias": x[0, :, :5],
        "return_weights": True,
        "return_logsumexp": True,
    }
    found, expected = layer({"query": x, "key": x}, **options), layer.definition(layer.read(), x, **options)
    for array, other in zip(found, expected, strict=True):
        equal(array, other)
    equal(found.weights.sum(-1), layer(query=x, key=x, **options).weights.sum(-1))
    assert not bool(found.weights[0, :, :, 2:].any())


def test_wrong_settings_raise_before_parameters_are_made(monkeypatch):
    def made(*dims, **options):
        raise AssertionError("a parameter was made")

    monkeypatch.setattr(torch, "empty", made)
    for call, error, message in (
        (lambda: attention_torch.MultiHeadAttention(7, 2), ValueError, "expected channels that 2 heads share out evenly; got 7"),
        (lambda: attention_torch.MultiHeadAttention(8), TypeError, "num_heads"),
        (lambda: attention_torch.FeedForward(8, 2, depth=3), TypeError, "depth"),
        (lambda: attention_torch.FeedForward(8, 2, dropout=1.0), ValueError, r"expected a dropout rate in \[0, 1\); got 1.0"),
        (lambda: attention_torch.FeedForward(8, 2, dtype=torch.int32), TypeError, "expected dtype torch.float16 or .*; got torch.int32"),
        (lambda: attention_torch.FeedForward(8, 2, dtype="float32"), TypeError, "expected dtype torch.float16 or .*; got 'float32'"),
        (lambda: attention_torch.FeedForward(8, 2, seed=-1), ValueError, r"expected a seed in \[0, 2\*\*64\); got -1"),
        (lambda: attention_torch.FeedForward(8, 2, seed=True), TypeError, "expected a seed as an integer"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def test_errors_of_a_call_are_those_of_the_core():
    layer = attention_torch.MultiHeadAttention(8, 2, dropout=0.5)
    x = torch.ones(2, 5, 8)
    for call, error, message in (
        (lambda: layer(x.double()), TypeError, "expected query projection.weight of dtype float64 to match query; got float32"),
        (lambda: layer(x, mask=torch.ones(5, 5)), TypeError, "expected mask of dtype bool, .*; got float32"),
        (lambda: layer(x, seed=1.5), TypeError, "expected a seed as an integer"),
        (lambda: layer(None), TypeError, "expected query .*; got NoneType"),
        (lambda: layer({"value": x}), ValueError, "expected a mapping with query; got value"),
        (lambda: layer(x.numpy()), TypeError, "expected tensors of PyTorch; got ndarray"),
        (lambda: layer({"query": x, "key": [1]}), TypeError, "expected tensors of PyTorch; got list"),
        (lambda: attention_torch.Embeddings(11, 7, 4)(torch.tensor([11])), ValueError, "expected token_ids in 0..10; got 11"),
        (lambda: attention_torch.SaganAttention(8)(torch.ones(1, 3, 4, 8)), ValueError, "expected even height and width"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def test_subclass_of_a_user_keeps_its_own_constructor():
    class Causal(attention_torch.MultiHeadAttention):
        def __init__(self, channels, *, heads):
            super().__init__(channels, heads, is_causal=True)

    assert list(inspect.signature(Causal).parameters) == ["channels", "heads"]
    assert Causal(8, heads=2).definition == definitions.MultiHeadAttention(8, 2, is_causal=True)


def test_examples_of_the_layers_print_what_they_say():
    found = doctest.testmod(attention_torch.layers)
    assert found.attempted > 10
    assert not found.failed


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
