"""Everything can be traced: what is compiled, exported or vectorized gives what eager gives.

Sizes, masks, lengths, offsets, segments and seeds may all be unknown while a function is traced.
"""

import importlib
import subprocess
import sys

import numpy as np
import pytest

from attention_core import (
    Causal,
    Dropout,
    KeyLengths,
    Segments,
    SlidingWindow,
    attention_scores,
    embed_tokens,
    encoder_layer,
    feed_forward,
    gelu,
    get_backend,
    initializers,
    layer_norm,
    linear,
    mask_from_integers,
    mask_from_padding,
    multi_head_attention,
    sagan_attention,
    scaled_dot_product_attention,
    spectral_norm,
)
from attention_core._backend import _find
from attention_core.parameters import (
    Embeddings,
    EncoderLayer,
    FeedForward,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    SaganAttention,
)
from attention_numpy.trees import map_arrays

# Compilers fuse and reorder: results differ by roundings, relative to the largest element.
CLOSE = {"float64": 1e-13, "float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}

pytestmark = [
    # array-api-compat remembers the namespace of a type in a cache, which PyTorch traces through, and says so once.
    pytest.mark.filterwarnings(
        "ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function at '_helpers"
    ),
]


@pytest.fixture(scope="module")
def torch():
    library = importlib.import_module("torch")
    importlib.import_module("torch._dynamo")
    return library


@pytest.fixture(scope="module")
def jax():
    return importlib.import_module("jax")


@pytest.fixture(scope="module")
def tf():
    return importlib.import_module("tensorflow")


# --- what is traced: functions of trees of arrays, and the arrays ---

RNG = np.random.default_rng(43)


def normal(*dims):
    return RNG.standard_normal(dims)


def affine(inputs, outputs):
    return Linear(normal(inputs, outputs), normal(outputs))


C = 8
QKV = normal(2, 6, 5, 4), normal(2, 3, 7, 4), normal(2, 3, 7, 3)
MASK, BIAS = RNG.random((2, 1, 5, 7)) > 0.4, normal(6, 5, 7)
SEGMENTS = RNG.integers(0, 2, (2, 5)), RNG.integers(0, 2, (2, 7))
LENGTHS, OFFSETS, SEED = np.asarray([3, 0]), np.asarray([2, -3]), np.asarray([7, 9], dtype=np.int32)
HEADS = MultiHeadAttention(affine(C, 12), affine(C, 6), affine(C, 10), affine(20, C))
SELF = MultiHeadAttention(affine(C, C), affine(C, C), affine(C, C), affine(C, C))
NORM = LayerNorm(normal(C), normal(C))
MLP = FeedForward(affine(C, 10), affine(10, C))
LAYER = EncoderLayer(SELF, NORM, MLP, LayerNorm(normal(C), normal(C)))
TABLES = Embeddings(normal(13, C), normal(9, C), normal(2, C), NORM)
SAGAN = SaganAttention(affine(C, 3), affine(C, 3), affine(C, 5), affine(5, C), np.asarray(0.7))
X, IDS, KEPT = normal(2, 5, C), RNG.integers(0, 13, (2, 5)), np.asarray([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def attend(**options):
    """Attention with options that are known while tracing."""
    return lambda query, key, value: scaled_dot_product_attention(query, key, value, **options)


def masked(rule):
    """Attention under a mask made of traced arrays."""
    return lambda query, key, value, *arrays: scaled_dot_product_attention(query, key, value, mask=rule(*arrays))


def everything(query, key, value, mask, bias, seed):
    return tuple(
        scaled_dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=True,
            bias=bias,
            scale=0.4,
            softcap=3.0,
            dropout=Dropout(0.25, seed),
            return_weights=True,
            return_logsumexp=True,
        )
    )


CASES = {
    "plain": (attend(), QKV),
    "causal": (attend(is_causal=True), QKV),
    "window": (attend(mask=SlidingWindow(1, 2)), QKV),
    "softcap": (attend(softcap=2.0, scale=0.3), QKV),
    "flags": (lambda *qkv: tuple(attend(return_weights=True, return_logsumexp=True)(*qkv)), QKV),
    "mask": (masked(lambda mask: mask), (*QKV, MASK)),
    "causal_and_mask": (
        lambda q, k, v, mask: scaled_dot_product_attention(q, k, v, mask=mask, is_causal=True),
        (*QKV, MASK),
    ),
    "combined": (
        masked(lambda lengths, offset: (KeyLengths(lengths) | Causal(offset)) & SlidingWindow(3, 2, offset)),
        (*QKV, LENGTHS, OFFSETS),
    ),
    "combined_with_array": (
        masked(lambda mask, lengths: (mask | KeyLengths(lengths)) & ~SlidingWindow(0, 0)),
        (*QKV, MASK, LENGTHS),
    ),
    "lengths": (masked(KeyLengths), (*QKV, LENGTHS)),
    "offsets": (masked(Causal), (*QKV, OFFSETS)),
    "offset": (masked(Causal), (*QKV, np.asarray(1))),
    "segments": (masked(Segments), (*QKV, *SEGMENTS)),
    "bias": (lambda q, k, v, bias: scaled_dot_product_attention(q, k, v, bias=bias, is_causal=True), (*QKV, BIAS)),
    "scale_and_softcap": (
        lambda q, k, v, scale, cap: scaled_dot_product_attention(q, k, v, scale=scale, softcap=cap),
        (*QKV, np.asarray(0.3), np.asarray(2.0)),
    ),
    "dropout": (lambda q, k, v, seed: attend(dropout=Dropout(0.25, seed))(q, k, v), (*QKV, SEED)),
    "everything": (everything, (*QKV, MASK, BIAS, SEED)),
    "scores": (lambda q, k, mask: attention_scores(q, k, mask=mask, softcap=2.0), (*QKV[:2], MASK)),
    "multi_head_attention": (
        lambda p, x, lengths: multi_head_attention(
            p, x, num_heads=4, num_key_value_heads=2, is_causal=True, mask=KeyLengths(lengths)
        ),
        (HEADS, X, LENGTHS),
    ),
    "encoder_layer": (
        lambda p, x, kept: encoder_layer(p, x, num_heads=2, mask=mask_from_padding(mask_from_integers(kept))),
        (LAYER, X, KEPT),
    ),
    "encoder_layer_dropout": (
        lambda p, x, seed: encoder_layer(p, x, num_heads=2, norm_first=False, dropout=Dropout(0.2, seed)),
        (LAYER, X, SEED),
    ),
    "embed_tokens": (lambda p, ids, segments: embed_tokens(p, ids, segment_ids=segments), (TABLES, IDS, SEGMENTS[0])),
    "sagan_attention": (
        lambda p, x: tuple(sagan_attention(p, x, return_weights=True))[:2],
        (SAGAN, normal(2, 4, 6, C)),
    ),
    "sagan_attention_channels_first": (
        lambda p, x: sagan_attention(p, x, pool=False, data_format="channels_first"),
        (SAGAN, normal(2, C, 4, 3)),
    ),
    "spectral_norm": (lambda w, u: spectral_norm(w, u, iterations=2), (normal(3, 2, 4), normal(4))),
    "gelu": (gelu, (normal(3, 5),)),
    "linear": (linear, (SELF.query, X)),
    "layer_norm": (layer_norm, (NORM, X)),
    "feed_forward": (feed_forward, (MLP, X)),
}
FEW = ("causal", "everything", "encoder_layer", "embed_tokens", "sagan_attention", "combined_with_array")
SIXTEEN = [("everything", "bfloat16"), ("encoder_layer", "float16"), ("embed_tokens", "bfloat16")]


def case(name, library, dtype=None):
    """A function with its arrays in the dtype that is asked for, which is float64 by default."""
    function, arrays = CASES[name]
    return function, get_backend(library).from_numpy(arrays, dtype=dtype)


def leaves(tree):
    found = []
    map_arrays(found.append, tree)
    return found


def assert_same(library, actual, expected):
    """Equal in dtype and, but for roundings, in values."""
    to_numpy = get_backend(library).to_numpy
    actual, expected = (leaves(to_numpy(tree)) for tree in (actual, expected))
    assert [result.dtype for result in actual] == [wanted.dtype for wanted in expected]
    assert expected
    exact = [wanted.astype(np.float64) for wanted in expected]
    largest = max(np.max(np.abs(wanted), initial=0.0, where=np.isfinite(wanted)) for wanted in exact)
    for result, wanted in zip(actual, exact, strict=True):
        np.testing.assert_allclose(result.astype(np.float64), wanted, rtol=0, atol=CLOSE[result.dtype.name] * largest)


def sized(batch, length, library):
    """Query, key, value, lengths: a batch of a size that the traced function has not seen."""
    rng = np.random.default_rng(batch * 100 + length)
    shapes = (batch, 6, length, 4), (batch, 3, length + 2, 4), (batch, 3, length + 2, 3)
    lengths = rng.integers(0, length, batch)
    return get_backend(library).from_numpy((*map(rng.standard_normal, shapes), lengths))


def attend_some(query, key, value, lengths):
    """Attention whose shapes and lengths are left open."""
    return scaled_dot_product_attention(query, key, value, mask=KeyLengths(lengths) & Causal(1))


def mean_square(function):
    """A number to differentiate: the mean of squares of the first result."""

    def measure(xp, *arrays):
        result = function(*arrays)
        return xp.mean(xp.multiply(result, result))

    return measure


# --- PyTorch ---


# torch.compile knows what & and | do to a tensor, and does not ask the mask; nor does it know ~ of a mask.
UNSEEN = {"combined_with_array"}


def compiled(torch, function, backend="eager", dynamic=False):
    """The function as one graph; "eager" and "aot_eager" trace as "inductor" does, and generate no code, which is slow."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", [name for name in CASES if name not in UNSEEN])
def test_torch_compile_makes_one_graph(torch, name):
    function, arrays = case(name, "torch")
    assert_same("torch", compiled(torch, function)(*arrays), function(*arrays))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["everything", "mask"])
def test_torch_compile_down_to_machine_code(torch, name):
    function, arrays = case(name, "torch")
    assert_same("torch", get_backend("torch").compile(function)(*arrays), function(*arrays))


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("name", "dtype"), SIXTEEN)
def test_torch_compile_of_16_bits(torch, name, dtype):
    function, arrays = case(name, "torch", dtype)
    assert_same("torch", compiled(torch, function, "aot_eager")(*arrays), function(*arrays))


COLD = """
import torch
from attention_core import {names}
def function(*arrays):
    query = arrays[0]
    return {call}
arrays = torch.ones(2, 2, 3, 4), torch.tensor([3, 1]), torch.tensor([7, 9])
print(torch.compile(function, fullgraph=True, backend="eager")(*arrays).shape)
"""
ATTENTION = "scaled_dot_product_attention(query, query, query, {options})"


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("names", "options"),
    [
        ("scaled_dot_product_attention", ""),
        ("scaled_dot_product_attention", "is_causal=True"),
        ("scaled_dot_product_attention, KeyLengths", "mask=KeyLengths(arrays[1])"),
        ("scaled_dot_product_attention, Dropout", "dropout=Dropout(0.1, arrays[2])"),
    ],
)
def test_torch_compile_may_be_the_first_to_call_the_core(torch, names, options):
    """Nothing that the core remembers from earlier calls is needed to trace it."""
    program = COLD.format(names=names, call=ATTENTION.format(options=options))
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.stdout == "torch.Size([2, 2, 3, 4])\n", run.stderr


WARM = """
import torch
from attention_core import scaled_dot_product_attention
def attend(x):
    return scaled_dot_product_attention(x, x, x, arithmetic="reproducible")
def function(*arrays):
    return sum(map(attend, arrays))
tensor = torch.ones(2, 3, 4)
attend(tensor)
print(torch.compile(function, fullgraph=True, backend="eager")(tensor, torch.nn.Parameter(tensor)).shape)
"""


@pytest.mark.needs("torch")
def test_torch_compile_finds_the_kin_of_classes_that_are_known(torch):
    """What is remembered of tensors when a program is traced does not keep it from what parameters are."""
    run = subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, check=False)
    assert run.stdout == "torch.Size([2, 3, 4])\n", run.stderr


@pytest.mark.needs("torch")
def test_a_class_that_is_made_later_makes_no_program_anew(torch):
    testing = importlib.import_module("torch._dynamo.testing")
    counter = testing.CompileCounter()
    x = get_backend("torch").from_numpy(np.ones((2, 3, 4), dtype=np.float32))

    def attend(x):
        return scaled_dot_product_attention(x, x, x, arithmetic="reproducible")

    attend(x)
    function = compiled(torch, attend, counter)
    function(x)
    for factor in (2.0, 3.0):
        type("Later", (torch.Tensor,), {})
        torch.compile(lambda x, factor=factor: attend(x) * factor, fullgraph=True, backend="eager")(x)
        function(x)
    assert counter.frame_count == 1


@pytest.mark.needs("torch")
def test_a_class_of_another_library_keeps_its_backend(torch, monkeypatch):
    kind = type("Own", (torch.Tensor,), {"__module__": "numpy.elsewhere"})
    monkeypatch.setattr(_find, "_backends", {})
    _find._learn(torch.Tensor)
    assert _find._backends[torch.nn.Parameter] is get_backend("torch")
    assert kind not in _find._backends
    _find._learn(kind)
    assert _find._backends[kind] is get_backend("numpy")


@pytest.mark.needs("torch")
def test_torch_compile_with_open_lengths_compiles_once(torch):
    testing = importlib.import_module("torch._dynamo.testing")
    counter = testing.CompileCounter()
    function = compiled(torch, attend_some, counter, dynamic=True)
    for batch, length in ((2, 5), (4, 8), (3, 11)):
        arrays = sized(batch, length, "torch")
        expected = attend_some(*arrays)  # first: a graph is made anew once the core has learnt the names of new dtypes
        assert_same("torch", function(*arrays), expected)
    assert counter.frame_count == 1


@pytest.mark.needs("torch")
def test_torch_compile_with_open_length_down_to_machine_code(torch):
    function = compiled(torch, attend_some, "inductor", dynamic=True)
    for length in (5, 8):
        arrays = sized(2, length, "torch")
        assert_same("torch", function(*arrays), attend_some(*arrays))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", FEW[:3])
def test_torch_compile_of_gradients(torch, name):
    function, arrays = case(name, "torch")
    measure = get_backend("torch").value_and_grad(lambda *trees: torch.mean(leaves(function(*trees))[0] ** 2))
    assert_same("torch", compiled(torch, measure, "aot_eager")(*arrays), measure(*arrays))


def module_of(torch, function):
    class Module(torch.nn.Module):
        def forward(self, *arrays):
            return function(*arrays)

    return Module()


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", FEW)
def test_torch_export(torch, name):
    function, arrays = case(name, "torch")
    program = torch.export.export(module_of(torch, function), arrays)
    assert_same("torch", program.module()(*arrays), function(*arrays))


def exported_dims(torch):
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    keys = length + 2
    return ({0: batch, 2: length}, {0: batch, 2: keys}, {0: batch, 2: keys}, {0: batch})


@pytest.mark.needs("torch")
@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_with_open_batch_and_length(torch, strict):
    module = module_of(torch, attend_some)
    shapes = {"arrays": exported_dims(torch)}
    program = torch.export.export(module, sized(2, 5, "torch"), dynamic_shapes=shapes, strict=strict)
    for batch, length in ((4, 9), (3, 6)):
        arrays = sized(batch, length, "torch")
        assert_same("torch", program.module()(*arrays), attend_some(*arrays))


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
def test_torch_compile_takes_numbers_that_change(torch):
    """PyTorch makes them symbols from the second call on."""

    def attend(x, number):
        return scaled_dot_product_attention(x, x, x, scale=number, softcap=2 * number)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    x = torch.linspace(-1, 1, 2 * 9 * 4, dtype=torch.float64).reshape(2, 9, 4)
    for number in (0.5, 0.25, 0.75):
        torch.testing.assert_close(compiled(x, number), attend(x, number), rtol=0, atol=1e-14)


@pytest.mark.needs("torch")
def test_torch_export_takes_any_length(torch):
    """Also lengths from which on an eager call would look at its arrays."""
    module = module_of(torch, lambda query, key, value: scaled_dot_product_attention(query, key, value))
    x = torch.ones(2, 4, 128, 32)
    shapes = {"arrays": ({2: torch.export.Dim.DYNAMIC},) * 3}
    program = torch.export.export(module, (x, x, x), dynamic_shapes=shapes)
    for length in (64, 512):
        x = torch.ones(2, 4, length, 32)
        assert program.module()(x, x, x).shape == x.shape


@pytest.mark.needs("torch")
def test_torch_export_of_an_encoder_with_open_batch_and_length(torch):
    function, (parameters, x, kept) = case("encoder_layer", "torch")
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    module = module_of(torch, lambda x, kept: function(parameters, x, kept))
    shapes = {"arrays": ({0: batch, 1: length}, {0: batch, 1: length})}
    program = torch.export.export(module, (x, kept), dynamic_shapes=shapes)
    x, kept = torch.concat([x, x, x[:1]])[:, :4], torch.ones(5, 4, dtype=torch.int64)
    assert_same("torch", program.module()(x, kept), function(parameters, x, kept))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["lengths", "offsets", "mask", "causal"])
def test_torch_vmap(torch, name):
    function, arrays = case(name, "torch")
    assert_same("torch", torch.func.vmap(function)(*arrays), function(*arrays))


@pytest.mark.needs("torch")
def test_torch_vmap_of_gradients(torch):
    """The gradient of every sample alone is that sample's part of the gradient of the sum."""
    function, (*qkv, mask) = case("mask", "torch")
    grad = torch.func.grad(lambda q, k, v, mask: torch.sum(function(q, k, v, mask) ** 2), argnums=(0, 1, 2))
    assert_same("torch", torch.func.vmap(grad)(*qkv, mask), grad(*qkv, mask))


# --- JAX ---


@pytest.mark.needs("jax")
@pytest.mark.parametrize("name", CASES)
def test_jax_jit(jax, name):
    function, arrays = case(name, "jax")
    assert_same("jax", jax.jit(function)(*arrays), function(*arrays))


@pytest.mark.needs("jax")
@pytest.mark.parametrize(("name", "dtype"), SIXTEEN)
def test_jax_jit_of_16_bits(jax, name, dtype):
    function, arrays = case(name, "jax", dtype)
    assert_same("jax", jax.jit(function)(*arrays), function(*arrays))


@pytest.mark.needs("jax")
@pytest.mark.parametrize("name", ["lengths", "offsets", "mask", "causal"])
def test_jax_vmap(jax, name):
    function, arrays = case(name, "jax")
    assert_same("jax", jax.vmap(function)(*arrays), function(*arrays))


@pytest.mark.needs("jax")
def test_jax_vmap_under_jit_over_a_tree(jax):
    function, (parameters, x, kept) = case("encoder_layer", "jax")
    mapped = jax.jit(jax.vmap(function, in_axes=(None, 0, 0)))
    assert_same("jax", mapped(parameters, x, kept), function(parameters, x, kept))


@pytest.mark.needs("jax")
@pytest.mark.parametrize("name", FEW[:3])
def test_jax_jit_of_gradients(jax, name):
    function, arrays = case(name, "jax")
    measure = get_backend("jax").value_and_grad(lambda *trees: jax.numpy.mean(leaves(function(*trees))[0] ** 2))
    assert_same("jax", jax.jit(measure)(*arrays), measure(*arrays))


@pytest.mark.needs("jax")
def test_jax_checkpoint_changes_no_gradient(jax):
    function, (parameters, x, kept) = case("encoder_layer", "jax")
    grad = jax.grad(lambda p, x: jax.numpy.sum(function(p, x, kept) ** 2))
    again = jax.grad(lambda p, x: jax.numpy.sum(jax.checkpoint(function)(p, x, kept) ** 2))
    assert_same("jax", jax.jit(again)(parameters, x), grad(parameters, x))


def symbolic(jax, arrays, dims):
    """Shapes and dtypes of arrays, with the named dimensions left open."""
    export = importlib.import_module("jax.export")
    scope = export.SymbolicScope()
    return [
        jax.ShapeDtypeStruct(export.symbolic_shape(text, scope=scope), array.dtype)
        for array, text in zip(arrays, dims, strict=True)
    ]


@pytest.mark.needs("jax")
def test_jax_export_with_open_batch_and_length(jax):
    export = importlib.import_module("jax.export")
    shapes = symbolic(jax, sized(2, 5, "jax"), ["b, 6, m, 4", "b, 3, m + 2, 4", "b, 3, m + 2, 3", "b"])
    program = export.deserialize(export.export(jax.jit(attend_some))(*shapes).serialize())
    for batch, length in ((2, 5), (4, 9)):
        arrays = sized(batch, length, "jax")
        assert_same("jax", program.call(*arrays), attend_some(*arrays))


@pytest.mark.needs("jax")
def test_jax_export_of_an_encoder_with_open_batch_and_length(jax):
    export = importlib.import_module("jax.export")
    function, (parameters, x, kept) = case("encoder_layer", "jax")
    encode = jax.jit(lambda x, kept: function(parameters, x, kept))
    program = export.export(encode)(*symbolic(jax, (x, kept), [f"b, l, {C}", "b, l"]))
    for batch, length in ((2, 5), (1, 3)):
        part, some = x[:batch, :length], kept[:batch, :length]
        assert_same("jax", program.call(part, some), function(parameters, part, some))


@pytest.mark.needs("jax")
def test_jax_shapes_without_computing(jax):
    function, arrays = case("everything", "jax")
    shapes = [(each.shape, each.dtype) for each in jax.eval_shape(function, *arrays)]
    assert shapes == [(each.shape, each.dtype) for each in function(*arrays)]


# --- TensorFlow ---


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("name", CASES)
def test_tensorflow_graph(tf, name):
    function, arrays = case(name, "tensorflow")
    assert_same("tensorflow", tf.function(function)(*arrays), function(*arrays))


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("name", CASES)
def test_tensorflow_compiled_by_xla(tf, name):
    function, arrays = case(name, "tensorflow")
    assert_same("tensorflow", tf.function(function, jit_compile=True)(*arrays), function(*arrays))


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize(("name", "dtype"), SIXTEEN)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_tensorflow_of_16_bits(tf, name, dtype, jit_compile):
    function, arrays = case(name, "tensorflow", dtype)
    assert_same("tensorflow", tf.function(function, jit_compile=jit_compile)(*arrays), function(*arrays))


def opened(tf, tree):
    """Specifications of arrays of which only rank and dtype are known; a seed of int32 has two words."""

    def specification(array):
        return tf.TensorSpec([2] if array.dtype == tf.int32 else [None] * len(array.shape), array.dtype)

    return map_arrays(specification, tree)


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("name", CASES)
def test_tensorflow_with_every_dimension_open(tf, name):
    function, arrays = case(name, "tensorflow")
    signature = opened(tf, arrays)
    if None in tf.nest.flatten(signature):  # for which the signature of a function has no place
        graph = tf.function(function).get_concrete_function(*signature)
    else:
        graph = tf.function(function, input_signature=signature)
    assert_same("tensorflow", graph(*arrays), function(*arrays))


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_tensorflow_with_open_batch_and_length_traces_once(tf, jit_compile):
    signature = [
        tf.TensorSpec(dims, tf.float64) for dims in ([None, 6, None, 4], [None, 3, None, 4], [None, 3, None, 3])
    ]
    signature.append(tf.TensorSpec([None], tf.int64))
    graph = tf.function(attend_some, input_signature=signature, jit_compile=jit_compile)
    for batch, length in ((2, 5), (4, 9)):
        arrays = sized(batch, length, "tensorflow")
        assert_same("tensorflow", graph(*arrays), attend_some(*arrays))
    assert graph.experimental_get_tracing_count() == 1


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("name", ["multi_head_attention", "encoder_layer", "encoder_layer_dropout", "embed_tokens"])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_tensorflow_layers_with_open_batch_and_length(tf, name, jit_compile):
    function, (parameters, *arrays) = case(name, "tensorflow")
    keep = 2 if name == "encoder_layer_dropout" else None  # the seed has two words
    signature = [
        tf.TensorSpec([None, None, *array.shape[2:]] if len(array.shape) > 1 else [keep], array.dtype)
        for array in arrays
    ]
    graph = tf.function(
        lambda *arrays: function(parameters, *arrays), input_signature=signature, jit_compile=jit_compile
    )
    assert_same("tensorflow", graph(*arrays), function(parameters, *arrays))


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("name", FEW[:3])
def test_tensorflow_graph_of_gradients(tf, name, jit_compile):
    function, arrays = case(name, "tensorflow")
    measure = get_backend("tensorflow").value_and_grad(lambda *trees: tf.reduce_mean(leaves(function(*trees))[0] ** 2))
    assert_same("tensorflow", tf.function(measure, jit_compile=jit_compile)(*arrays), measure(*arrays))


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_tensorflow_with_open_dimensions_that_turn_out_empty_or_one(tf, jit_compile):
    """No keys give zeros, not nan; and a mask of unknown shape may broadcast."""
    open_mask = tf.TensorSpec([None, None], tf.bool)

    @tf.function(
        input_signature=[tf.TensorSpec([None] * 4)] * 3 + [open_mask], jit_compile=jit_compile, autograph=False
    )
    def attend(query, key, value, mask):
        return [
            scaled_dot_product_attention(query, key, value, **options)
            for options in ({}, {"mask": mask}, {"mask": mask, "is_causal": True})
        ]

    query, key, value = (tf.ones(dims) for dims in ((2, 2, 3, 4), (2, 2, 0, 4), (2, 2, 0, 5)))
    for output in attend(query, key, value, tf.ones((3, 1), tf.bool)):
        assert (output.numpy() == 0).all()
        assert output.shape == (2, 2, 3, 5)
    for mask in ([[True, False, True]], [[True], [True], [False]]):
        expected = scaled_dot_product_attention(query, query, query, mask=tf.constant(mask), is_causal=True)
        np.testing.assert_allclose(attend(query, query, query, tf.constant(mask))[2], expected, rtol=1e-6)


@pytest.mark.needs("tensorflow")
def test_tensorflow_gradients_with_every_dimension_open(tf):
    function, arrays = case("everything", "tensorflow")
    measure = get_backend("tensorflow").value_and_grad(lambda *trees: tf.reduce_mean(function(*trees)[0] ** 2))
    graph = tf.function(measure, input_signature=opened(tf, arrays))
    assert_same("tensorflow", graph(*arrays), measure(*arrays))


@pytest.mark.needs("tensorflow")
def test_tensorflow_saved_model_round_trip(tf, tmp_path):
    function, (parameters, x, kept) = case("encoder_layer", "tensorflow")
    signature = [tf.TensorSpec([None, None, C], x.dtype), tf.TensorSpec([None, None], kept.dtype)]
    module = tf.Module()
    module.encode = tf.function(lambda x, kept: function(parameters, x, kept), input_signature=signature)
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    for length in (5, 3):
        part = x[:, :length], kept[:, :length]
        assert_same("tensorflow", loaded.encode(*part), function(parameters, *part))


# --- initializers, on whatever backend ---


INITIALIZERS = ["uniform", "normal", "truncated_normal", "glorot_uniform", "he_uniform", "lecun_normal"]


@pytest.mark.parametrize("name", INITIALIZERS)
def test_initial_parameters_of_a_traced_seed_have_the_same_bits(backend, name):
    initialize = getattr(initializers, name)
    expected = initialize((9 << 32) + 7, (4, 5), xp=get_backend("numpy").namespace)
    seed = backend.from_numpy(SEED)

    def initial(seed):
        return initialize(seed, (4, 5), xp=backend.namespace)

    made = traced(backend, initial, seed, by_table="uniform" not in name)(seed)
    np.testing.assert_array_equal(backend.to_numpy(made), expected)


def traced(backend, function, seed, by_table):
    """The function compiled; on PyTorch exported where there is a table, of which it would guard each of 65,536 entries."""
    if backend.name != "torch":
        return backend.compile(function)
    torch = importlib.import_module("torch")
    if by_table:
        return torch.export.export(module_of(torch, function), (seed,)).module()
    return compiled(torch, function, "aot_eager")
