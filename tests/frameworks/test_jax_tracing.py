"""What compilers make of functions gives what eager gives, on JAX what NumPy gives; and initializers of any seed."""

import importlib

import numpy as np
import pytest
from backend_helpers import imported
from tracing_helpers import (
    CASES,
    OF_INTEGERS,
    SEED,
    SIXTEEN,
    assert_same,
    case,
    compiled,
    module_of,
)

import attention_core as ac
from attention_core import initializers, layers
from attention_core.backend import get_backend
from attention_core.random import dropout_mask
from attention_numpy.trees import map_arrays

pytestmark = [
    # array-api-compat remembers the namespace of a type in a cache, which PyTorch traces through, and says so once.
    pytest.mark.filterwarnings(
        "ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function at '_helpers"
    ),
]


jax, tf = imported("jax"), imported("tensorflow")


@pytest.fixture
def rewritten(tf, monkeypatch):
    """The functions that AutoGraph rewrites."""
    from tensorflow.python.autograph.impl import api

    functions, convert = [], api._convert_actual
    monkeypatch.setattr(api, "_convert_actual", lambda each, *rest: functions.append(each) or convert(each, *rest))
    return functions


def expected(name, dtype=None):
    """Of NumPy, as eager JAX compiles each operation."""
    function, arrays = case(name, "numpy", dtype)
    return function(*arrays)


@pytest.mark.needs(
    lambda name, dtype, backend: (
        backend.name == "tensorflow" or (backend.name == "jax" and (dtype is not None or name in OF_INTEGERS))
    )
)
@pytest.mark.parametrize(("name", "dtype"), [*((name, None) for name in CASES), *SIXTEEN])
def test_programs_of_xla_are_what_is_called(name, dtype, backend):
    """And graphs of TensorFlow, of 16 bits. Other programs of JAX have gradients, in `test_gradients`."""
    function, arrays = case(name, backend.name, dtype)
    if backend.name == "jax":
        assert_same("jax", importlib.import_module("jax").jit(function)(*arrays), expected(name, dtype))
        return
    for jit_compile in (True,) if dtype is None else (True, False):
        program = importlib.import_module("tensorflow").function(function, jit_compile=jit_compile)
        assert_same("tensorflow", program(*arrays), function(*arrays))


@pytest.mark.optimized
@pytest.mark.needs("jax")
def test_jax_vmap_of_what_is_compiled_in_reproducible_arithmetic_has_the_same_bits(jax, rng):
    queries, key = (jax.numpy.asarray(rng.standard_normal(shape), "float32") for shape in ((3, 2, 5, 4), (2, 7, 4)))

    @jax.jit
    def attend(query):
        return ac.scaled_dot_product_attention(query, key, key, arithmetic="reproducible")

    @jax.jit
    def both(query):
        """The output and the gradient, of one program."""
        found = jax.value_and_grad(lambda query: ((output := attend(query)).sum(), output), has_aux=True)(query)
        return found[0][1], found[1]

    outputs, gradients = (each[0] for each in jax.vmap(jax.jit(jax.vmap(both)))(queries[None]))
    for query, *found in zip(queries, outputs, gradients, strict=True):
        for one, other in zip(both(query), found, strict=True):
            np.testing.assert_array_equal(one, other)
    jacobian = jax.jacrev(lambda query: attend(query).sum(axis=(1, 2)))(queries[0])  # of each head by all
    np.testing.assert_array_equal(jacobian.sum(axis=0), gradients[0])


@pytest.mark.needs("tensorflow")
def test_autograph_rewrites_the_function_of_a_user_and_leaves_ours_as_they_are(tf, rewritten):
    import attention_keras

    def step(x, seed):
        xp = get_backend("tensorflow").namespace
        cache = decoder.empty_cache((2,), 7, xp=xp)
        y, new = decoder(weights, x, cache=cache)
        if tf.reduce_sum(y) > 0:  # which a graph takes from AutoGraph alone
            y = feed(y)
        y = xp.add(y, xp.where(dropout_mask(ac.Dropout(0.2, seed), y, xp=xp), y, 0.0))
        masks = (ac.cache.cache_mask(new, 3) & ac.KeyLengths(2)).to_array(3, 7, xp=xp)
        return y, masks, ac.functions.rotary_embedding(y, xp.arange(3)), sagan.updated_state(*vectors)

    xp = get_backend("tensorflow").namespace
    decoder, sagan, feed = layers.DecoderLayer(6, 3, 8), layers.SaganAttention(8), attention_keras.FeedForward(6, 7)
    weights, vectors = decoder.init(0, xp=xp), (sagan.init(0, xp=xp), sagan.init_state(0, xp=xp))
    tf.function(step)(tf.ones((2, 3, 6)), tf.constant([7, 9]))
    assert step in rewritten
    assert not [each.__qualname__ for each in rewritten if each.__module__.startswith("attention_")]


def opened(tf, tree):
    """Specifications of arrays of which only rank and dtype are known."""
    return map_arrays(lambda array: tf.TensorSpec([None] * len(array.shape), array.dtype), tree)


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize(
    "name", sorted(set(CASES) - {"relative bias", "multi-head", "weights", "rotary", "dropout by words"})
)  # whose sizes are to be known
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
def test_tensorflow_with_open_dimensions_that_turn_out_empty_or_one(tf, jit_compile):
    """No keys give zeros, not nan; and a mask of unknown shape may broadcast."""
    open_mask = tf.TensorSpec([None, None], tf.bool)
    exact = {"arithmetic": "fast" if jit_compile else "reproducible"}  # which XLA cannot cut into blocks of no keys

    @tf.function(input_signature=[tf.TensorSpec([None] * 3 + [4])] * 3 + [open_mask], jit_compile=jit_compile)
    def attend(query, key, value, mask):
        return [
            ac.scaled_dot_product_attention(query, key, value, **options)
            for options in ({}, exact, {"mask": mask}, {"mask": mask, "is_causal": True})
        ]

    query, key, value = (tf.ones(dims) for dims in ((2, 2, 3, 4), (2, 2, 0, 4), (2, 2, 0, 4)))
    for output in attend(query, key, value, tf.ones((3, 1), tf.bool)):
        np.testing.assert_array_equal(output, np.zeros((2, 2, 3, 4)))
    for mask in ([[True, False, True]], [[True], [True], [False]]):
        expected = ac.scaled_dot_product_attention(query, query, query, mask=tf.constant(mask), is_causal=True)
        np.testing.assert_allclose(attend(query, query, query, tf.constant(mask))[3], expected, rtol=1e-6)
    append, arrays = case("append", "tensorflow")
    none = [*arrays[:3], *(x[..., :0, :] for x in arrays[3:5]), 0 * arrays[5]]
    graph = tf.function(append, input_signature=opened(tf, arrays), jit_compile=jit_compile)
    assert_same("tensorflow", graph(*none), append(*none))


@pytest.mark.parametrize("name", ["uniform", "normal"])  # of which the others are made
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


@pytest.mark.needs("jax")
def test_a_masked_program_holds_its_softmax_once(jax):
    """And not a second one for what is not finite, so that a layer compiles nearly as fast as without a mask."""
    arrays = [jax.numpy.ones((2, 3, 7, 4), jax.numpy.float32)] * 3
    program = jax.make_jaxpr(lambda *each: ac.scaled_dot_product_attention(*each, is_causal=True))(*arrays)
    assert str(program).count("reduce_max[") == 1


@pytest.mark.needs("jax")
def test_an_infinite_value_leaves_the_gradients_of_others_finite(jax, rng):
    query, key, value = (jax.numpy.asarray(rng.standard_normal((1, 1, 6, 4)), "float32") for _ in range(3))
    value = value.at[0, 0, 2, 0].set(jax.numpy.inf)
    attend = jax.jit(lambda *each: ac.scaled_dot_product_attention(*each, mask=ac.SlidingWindow(left=1, right=0)))
    output, transposed = jax.vjp(attend, query, key, value)
    gradients = transposed(jax.numpy.ones_like(output))
    assert [np.isfinite(each).all() for each in gradients] == [False, False, True]
