"""The layers of every framework are their definitions: first weights, calls, gradients, files and mistakes."""

import contextlib
import copy
import doctest
import importlib
import inspect
import itertools
import pickle
import re

import numpy as np
import pytest
from layer_helpers import CASES, DROPPING, NUMPY, Layers, alike, class_of, definition_of, perturbed

import attention_models as models
from attention_core import layers
from attention_core.layers import named_arrays

pytestmark = [
    pytest.mark.needs("gradients"),
    # So TensorFlow's variables answer when Keras asks NumPy for them.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]
every = pytest.mark.parametrize("name", CASES)
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def of_types(dtype, name):
    """Every layer in one type, and a layer in every type."""
    each = [(dtype, kind) for kind in CASES]
    return pytest.mark.parametrize(("dtype", "name"), [*each, *((other, name) for other in DTYPES if other != dtype)])


@pytest.fixture
def adapter(backend):
    return Layers(backend)


@every
def test_constructors_show_the_settings_and_what_the_framework_is_used_to(name, adapter):
    kind, definition = class_of(name, adapter.module.__name__), definition_of(name)
    before, after, function = {
        "torch": ([], ["device", "dtype", "seed"], kind),
        "jax": (["key"], ["dtype", "device"], getattr(kind, "init", None)),
        "tensorflow": ([], ["seed", "kwargs"], kind),
    }[adapter.backend.name]
    settings, shown = inspect.signature(definition).parameters, inspect.signature(function).parameters
    assert list(shown) == [*before, *settings, *after]
    defaults = getattr(kind, "defaults", {})
    for each, parameter in settings.items():
        assert (shown[each].kind, shown[each].default) == (parameter.kind, defaults.get(each, parameter.default))
    assert (kind.__name__, name) == (name, definition.__name__)


CALLS = {"torch": "forward", "tensorflow": "call"}  # which show the arguments of each class


def parameters_in(documentation):
    """The names of a section of parameters."""
    section = re.search(r"Parameters\n-+\n(.*?)(?:\n\n|\Z)", documentation, re.DOTALL)
    lines = re.findall(r"^\S[^:\n]*", section[1] if section else "", re.MULTILINE)
    return {name for line in lines for name in line.strip().split(", ")}


@pytest.mark.needs(lambda backend: backend.name in CALLS)
@every
def test_each_setting_and_each_option_of_a_call_is_documented(name, adapter):
    kind, settings = class_of(name, adapter.module.__name__), inspect.signature(definition_of(name)).parameters
    told = parameters_in(inspect.getdoc(kind))
    assert settings.keys() <= told or "**settings" in told
    call = getattr(kind, CALLS[adapter.backend.name])
    told, shown = parameters_in(inspect.getdoc(call)), inspect.signature(call).parameters.keys() - {"self"}
    assert told == (shown if told else set())


DOCUMENTED = [("torch", "attention_torch.layers"), ("jax", "attention_jax.layers"), ("jax", "attention_jax.masks"),
              ("tensorflow", "attention_keras.layers")]  # fmt: skip


@pytest.mark.needs(lambda backend, owner: backend.name == owner)
@pytest.mark.parametrize(("owner", "home"), DOCUMENTED)
def test_examples_of_the_documentation_print_what_they_say(owner, home, backend):
    with importlib.import_module("jax").enable_x64(False) if owner == "jax" else contextlib.nullcontext():
        found = doctest.testmod(importlib.import_module(home))
    assert found.attempted > 0
    assert not found.failed


@of_types("float32", "SaganAttention")
def test_first_weights_are_the_bits_of_the_definition_under_its_names(name, dtype, adapter):
    settings, kind, seed = CASES[name][0], definition_of(name), 2**40 + 3
    layer = adapter.new(name, seed, dtype, **settings)
    assert layer.definition == kind(**settings)
    drawn = "float32" if dtype == "bfloat16" else dtype  # which the namespace of NumPy does not have
    starts = layer.definition.init, layer.definition.init_state
    trees = [NUMPY.from_numpy(start(seed, xp=NUMPY.namespace, dtype=drawn), dtype=dtype) for start in starts]
    alike(layer.to_numpy(), trees)
    for held, tree, prefix in zip(adapter.weights(layer), trees, ("", "state"), strict=True):
        expected = {name: array.shape for name, array in named_arrays(tree, prefix).items()}
        assert {name: tuple(tensor.shape) for name, tensor in held.items()} == expected


@every
@pytest.mark.parametrize("training", [False, True])
def test_a_call_is_that_of_the_definition_on_numpy(name, training, adapter, get):
    layer, (inputs, options) = adapter.made(name, "float64"), adapter.inputs(name, "float64")
    parameters, state = layer.to_numpy()
    _, arrays, same = CASES[name]
    held = {"state": state} if state else {}
    seeded = {"seed": 2**40 + 9} if training and name in DROPPING else {}
    expected = layer.definition(parameters, *arrays, **same, **held, **seeded)
    found = adapter.call(layer, *inputs, **options, training=training, seed=2**40 + 9)
    np.testing.assert_allclose(get(found), expected, rtol=0, atol=1e-12)
    plain = layer.definition(parameters, *arrays, **same, **held)
    assert np.array_equal(expected, plain) == (not seeded)
    if len(inputs) > 1 and adapter.backend.name in CALLS:
        by_name = dict(zip(("key", "value"), inputs[1:], strict=False))
        found = adapter.call(layer, inputs[0], **by_name, **options)
        np.testing.assert_allclose(get(found), plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_definition(name, adapter, backend, get, rng):
    layer, (inputs, options) = adapter.made(name, "float64"), adapter.inputs(name, "float64")
    parameters, state = backend.from_numpy(layer.to_numpy())
    held, xp = {"state": state} if state else {}, backend.namespace
    factor = backend.from_numpy(rng.standard_normal(tuple(adapter.call(layer, *inputs, **options).shape)))

    def measured(output):
        return xp.sum(xp.multiply(output, factor))

    found = adapter.gradients(layer, lambda layer: measured(adapter.call(layer, *inputs, **options)))
    differentiated = backend.value_and_grad(lambda tree: measured(layer.definition(tree, *inputs, **options, **held)))
    expected = (backend.compile(differentiated) if backend.name == "jax" else differentiated)(parameters)[1]
    expected = named_arrays(expected[0])
    assert set(found) == set(expected)
    for key, gradient in found.items():
        np.testing.assert_allclose(get(gradient), get(expected[key]), rtol=0, atol=1e-12)
        assert np.any(get(gradient)) or key.endswith("key.bias")  # which moves all scores of a query alike


@pytest.mark.parametrize("name", ["Decoder", "DecoderLayer"])
def test_a_layer_makes_its_cache_of_its_own_dtype(name, adapter, get):
    for dtype in ("float32", "bfloat16"):
        layer, (inputs, _) = adapter.made(name, dtype), adapter.inputs(name, dtype)
        cache, parts = layer.empty_cache((2,), 6, ragged=dtype == "bfloat16"), []
        for part in (slice(3), slice(3, 5)):
            output, cache = adapter.call(layer, inputs[0][:, part], cache=cache)
            parts.append(get(output))
        key = cache.key[0] if name == "Decoder" else cache.key
        assert str(key.dtype).endswith(dtype if adapter.backend.name != "tensorflow" else f"{dtype}'>")
        assert get(cache.length).tolist() == ([5, 5] if dtype == "bfloat16" else 5)
        if dtype == "float32":
            np.testing.assert_allclose(np.concatenate(parts, 1), get(adapter.call(layer, inputs[0])), rtol=0, atol=2e-5)
    with pytest.raises(AttributeError):
        adapter.made("FeedForward").empty_cache((2,), 6)


def test_generate_takes_a_layer_with_its_parameters(adapter, backend, get):
    layer, (ids,) = adapter.made("Decoder"), adapter.inputs("Decoder", "float32")[0]
    logits = []
    found = models.generate(layer, ids, max_new_tokens=3, on_step=lambda _, each: logits.append(each))
    parameters = backend.from_numpy(layer.to_numpy()[0])
    expected = models.generate(layer.definition, parameters, ids, max_new_tokens=3)
    np.testing.assert_array_equal(get(found.token_ids), get(expected.token_ids))
    assert not any(getattr(each, "requires_grad", False) for each in logits)
    with pytest.raises(TypeError):
        models.generate(layer, parameters, ids, max_new_tokens=3)
    with pytest.raises(TypeError):
        models.generate(adapter.made("FeedForward"), ids, max_new_tokens=3)


@of_types("float16", "MultiHeadAttention")
def test_arrays_files_and_copies_hold_a_layer_bit_for_bit(name, dtype, adapter, tmp_path):
    module, layer, path = adapter.module, adapter.made(name, dtype), tmp_path / "layer.safetensors"
    trees = perturbed(layer.definition, dtype)
    module.save(layer, path)
    again = type(layer).from_numpy(layer.definition, *layer.to_numpy())
    for each in (layer, again, module.load(path), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(each) is class_of(name, module.__name__)
        assert each.definition == layer.definition
        alike(each.to_numpy(), trees)
    for each in (
        module.load(path, dtype=adapter.dtype("bfloat16")),
        module.Layer.from_numpy(layer.definition, *trees, dtype=adapter.dtype("bfloat16")),
    ):
        alike(each.to_numpy(), [NUMPY.from_numpy(tree, dtype="bfloat16") for tree in trees])


@pytest.mark.parametrize(("dtype", "name"), list(zip(itertools.cycle(["float16", "bfloat16"]), CASES, strict=False)))
def test_sixteen_bits_are_computed_in_float32_and_rounded_once(name, dtype, adapter, backend, get):
    layer = adapter.made(name, dtype)
    wide = adapter.module.Layer.from_numpy(layer.definition, *layer.to_numpy(), dtype=adapter.dtype("float32"))
    inputs, options = adapter.inputs(name, dtype)
    widened = backend.from_numpy(get(inputs), dtype="float32")
    found, expected = adapter.call(layer, *inputs, **options), get(adapter.call(wide, *widened, **options))
    rounded = NUMPY.from_numpy(expected, dtype=dtype)
    assert get(found).dtype == rounded.dtype
    # Normalized kernels are rounded in between, and a decoder rounds between its layers.
    close = {"SaganAttention": 4, "Decoder": 16, "DecoderLayer": 16}.get(name, 0) * float(np.spacing(rounded.max()))
    np.testing.assert_allclose(get(found).astype(float), rounded.astype(float), rtol=0, atol=close)


def test_settings_are_changed_in_a_copy_and_not_by_assignment(adapter, backend, tmp_path):
    layer, x = adapter.made("FeedForward"), np.linspace(-1, 1, 10, dtype=np.float32).reshape(2, 5)
    with pytest.raises(AttributeError):
        layer.arithmetic = "reproducible"
    changes = {"arithmetic": "reproducible", "dropout": 0.0}
    exact = layer.definition.with_settings(**changes)
    expected = exact(layer.to_numpy()[0], x)
    adapter.module.save(layer, tmp_path / "layer.safetensors")
    loaded = adapter.module.load(tmp_path / "layer.safetensors", **changes)
    for each in (layer.with_settings(**changes), loaded):
        assert each.definition == exact
        np.testing.assert_array_equal(backend.to_numpy(each(backend.from_numpy(x))), expected)
    assert layer.definition.dropout == 0.4


def test_arrays_that_do_not_fit_make_no_layer(adapter):
    definition = layers.SaganAttention(8, data_format="channels_last")
    parameters, state = perturbed(definition)
    narrow = parameters._replace(g=parameters.g._replace(weight=np.ones((8, 3))))
    for wrong in ((layers.FeedForward(5, 7), parameters, state), (definition, parameters), (definition, narrow, state)):
        with pytest.raises((TypeError, ValueError)):
            adapter.module.SaganAttention.from_numpy(*wrong)


@pytest.mark.parametrize("training", [False, True])
def test_vectors_of_kernels_advance_in_training_alone(training, adapter, backend):
    """After the call, which takes those from before; layers of JAX are refreshed by whoever trains them."""
    layer, (inputs, _) = adapter.made("SaganAttention", "float64"), adapter.inputs("SaganAttention", "float64")
    parameters, before = layer.to_numpy()
    after = layer.definition.updated_state(parameters, before)
    for _ in range(2):
        expected = layer.definition(parameters, *CASES["SaganAttention"][1], state=before)
        found = backend.to_numpy(adapter.call(layer, *inputs, training=training))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
        if training:
            layer = layer.refreshed() if backend.name == "jax" else layer
            before, after = after, layer.definition.updated_state(parameters, after)
        for key, vector in named_arrays(layer.to_numpy()[1]).items():
            np.testing.assert_allclose(vector, named_arrays(before)[key], rtol=0, atol=1e-12)
            assert not np.allclose(vector, named_arrays(after)[key], rtol=0, atol=1e-3)
