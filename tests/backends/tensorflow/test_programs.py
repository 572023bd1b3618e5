"""Blocks are traced once for all programs with such arguments, but where that would change what a program is."""

import functools
import gc

import numpy as np
import pytest
import tensorflow as tf

from attention_core import KeyLengths, SlidingWindow, attention_scores, scaled_dot_product_attention
from attention_core.functions import linear
from attention_core.masks import MaskFunction
from attention_core.parameters import Linear
from attention_core.scores import ScoreMod
from attention_core.weights import attention_weights
from attention_tensorflow import programs

SHAPE = (2, 3, 70, 5)
WINDOW = SlidingWindow(left=9, right=0)


@pytest.fixture
def arrays(rng):
    programs._program.cache_clear()
    return [tf.constant(rng.standard_normal(SHAPE, dtype=np.float32)) for _ in range(3)]


def blocks(query, key, value, mask=WINDOW, **options):
    return scaled_dot_product_attention(query, key, value, mask=mask, implementation="blockwise", **options)


def output_and_gradients(*arrays, attend=blocks):
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        output = attend(*arrays)
        total = tf.reduce_sum(tf.sin(output))
    return output, *tape.gradient(total, arrays)


def num_traced():
    return programs._program.cache_info().misses


def assert_near(found, expected):
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_two_programs_of_three_calls_trace_one_forward_and_one_backward(arrays):
    def chain(query, key, value):
        for _ in range(3):
            query = output_and_gradients(query, key, value)[0]
        return query

    tf.function(chain)(*arrays)
    tf.function(lambda *arrays: chain(*arrays) + 1)(*arrays)
    assert num_traced() == 2
    blocks(*arrays)
    assert num_traced() == 2


def test_a_program_is_that_of_its_shapes_and_outlives_what_is_kept(arrays):
    program = tf.function(output_and_gradients)
    for length in (70, 50):
        some = [array[..., :length, :] for array in arrays]
        found = program.get_concrete_function(*some)
        assert [tuple(x.shape) for x in found.structured_outputs] == [(2, 3, length, 5)] * 4
        programs._program.cache_clear()
        gc.collect()
        assert_near(program(*some), output_and_gradients(*some))


def test_unknown_lengths_are_traced_with_their_program(arrays):
    program = tf.function(output_and_gradients, input_signature=[tf.TensorSpec((2, 3, None, 5))] * 3)
    assert_near(program(*arrays), output_and_gradients(*arrays))
    assert num_traced() == 0


@pytest.mark.parametrize(
    ("length", "options"),
    [(7, {"arithmetic": "reproducible"}), (0, {"arithmetic": "reproducible"}), (0, {"implementation": "blockwise"})],
    ids=["some reproducible", "no reproducible", "no keys in blocks"],
)
def test_programs_of_an_unknown_number_of_keys_have_the_bits_of_a_call(length, options, arrays):
    """Programs for XLA too, which compiles the loops that have no step."""
    some = [array[..., :7, :] for array in arrays[:1]] + [array[..., :length, :] for array in arrays[1:]]
    specs = [tf.TensorSpec((2, 3, 7, 5)), *[tf.TensorSpec((2, 3, None, 5))] * 2]

    def attend(*arrays):
        return scaled_dot_product_attention(*arrays, is_causal=True, **options)

    program = tf.function(attend, input_signature=specs, jit_compile=not length)
    np.testing.assert_array_equal(program(*some), attend(*some))


def test_batches_of_any_number_are_traced_once_for_all_calls(arrays):
    """As Keras builds models, and trains them after a last batch that is smaller."""
    one = tf.TensorSpec((None, 3, 70, 5))

    @functools.partial(tf.function, input_signature=[one] * 3)
    def program(query, key, value):
        output, *gradients = output_and_gradients(query, key, value)
        return output_and_gradients(output, key, value)[0], *gradients

    assert [tuple(x.shape) for x in program.get_concrete_function().structured_outputs] == [(None, 3, 70, 5)] * 4
    assert num_traced() == 2
    for batch in (2, 1, 0):
        some = [array[:batch] for array in arrays]
        output, *gradients = output_and_gradients(*some)
        assert_near(program(*some), [blocks(output, *some[1:]), *gradients])


def test_a_program_calls_the_branches_of_its_conditions(arrays):
    """Each copy of a repair in a program would be optimized anew, and none runs."""
    definition = tf.function(blocks).get_concrete_function(*arrays).graph.as_graph_def()
    nodes = [node for function in definition.library.function for node in function.node_def]
    conditions = [node for node in nodes if node.op in ("If", "StatelessIf")]
    assert conditions
    assert not any(node.attr["_lower_using_switch_merge"].b for node in conditions)


def test_programs_for_xla_hold_their_blocks(arrays):
    program = tf.function(blocks, jit_compile=True)
    operations = program.get_concrete_function(*arrays).graph.get_operations()
    assert not any("PartitionedCall" in operation.type for operation in operations)
    assert num_traced() == 0


def test_forward_alone_every_call_is_replaced_by_its_blocks(arrays):
    """As the converter of LiteRT needs it."""
    definition = tf.function(blocks).get_concrete_function(*arrays).graph.as_graph_def()
    assert num_traced() == 1
    assert not any(function.attr["_noinline"].b for function in definition.library.function)
    definition = tf.function(output_and_gradients).get_concrete_function(*arrays).graph.as_graph_def()
    assert sum(function.attr["_noinline"].b for function in definition.library.function) == 2


@pytest.mark.parametrize("option", ["mask", "score_mod"])
def test_functions_of_users_are_read_anew_and_see_their_program(option, arrays):
    def program(query, key, value, number):
        function = {
            "mask": MaskFunction(lambda batch, head, query, key: key < number),
            "score_mod": lambda scores, batch, head, query, key: scores * tf.cast(number, scores.dtype),
        }[option]
        return blocks(query, key, value, **{option: function})

    for number in (tf.constant(2), tf.constant(5)):
        assert_near([tf.function(program)(*arrays, number)], [program(*arrays, number)])
    assert num_traced() == 0


@pytest.mark.parametrize("softcap", [2.0, np.float32(2), tf.constant(2.0)])
def test_scores_that_are_capped_have_their_gradients(softcap, arrays):
    program = functools.partial(output_and_gradients, attend=functools.partial(blocks, softcap=softcap))
    assert_near(tf.function(program)(*arrays), program(*arrays))


def test_gradients_of_a_loop_and_of_a_variable(arrays):
    query, key, value = arrays
    variable = tf.Variable(query)

    def gradient(loop):
        with tf.GradientTape() as tape:
            found = loop(lambda x: blocks(x, key, value), variable + 0)
            total = tf.reduce_sum(found**2)
        return tape.gradient(total, variable)

    def unrolled(body, x):
        return body(body(body(x)))

    def traced(body, x):
        return tf.while_loop(lambda index, x: index < 3, lambda index, x: (index + 1, body(x)), (0, x))[1]

    assert_near([tf.function(gradient)(traced)], [gradient(unrolled)])


def test_a_second_gradient_is_refused(arrays):
    @tf.function
    def second(query):
        with tf.GradientTape() as outer:
            outer.watch(query)
            gradient = output_and_gradients(query, *arrays[1:])[1]
            total = tf.reduce_sum(gradient**2)
        return outer.gradient(total, query)

    with pytest.raises(NotImplementedError):
        second(arrays[0])


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_second_gradient_outside_of_a_program_gets_nothing_masked(jit_compile):
    """TensorFlow then differentiates by each number that a program keeps for its gradient."""
    query, key, value = (tf.reshape(tf.linspace(start, 1.0, 12), (1, 1, 3, 4)) for start in (-1.0, 0.0, 0.5))
    hidden = tf.constant([0.0, 0.0, 1.0])[:, None] > 0

    @functools.partial(tf.function, jit_compile=jit_compile)
    def program(*arrays):
        return scaled_dot_product_attention(*arrays, mask=tf.constant([True, True, False]), implementation="dense")

    def second(number):
        arrays = query, tf.where(hidden, number, key), tf.where(hidden, number, value)
        with tf.GradientTape() as outer:
            outer.watch(arrays)
            with tf.GradientTape() as inner:
                inner.watch(arrays)
                total = tf.reduce_sum(tf.sin(program(*arrays)))
            total = sum(tf.reduce_sum(x**2) for x in inner.gradient(total, arrays))
        return outer.gradient(total, arrays)

    assert_near(second(np.nan), second(0.0))


def test_a_saved_program_is_loaded_with_its_gradient(arrays, tmp_path):
    module = tf.Module()
    module.attend = tf.function(lambda *arrays: blocks(*arrays), input_signature=[tf.TensorSpec(SHAPE)] * 3)
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(module, tmp_path, options=options)
    loaded = tf.saved_model.load(tmp_path)
    assert_near(output_and_gradients(*arrays, attend=loaded.attend), output_and_gradients(*arrays))


def test_a_program_that_trains_is_saved_and_refuses_a_second_gradient(arrays, tmp_path):
    """TensorFlow traces the gradients of all that it saves, gradients included."""
    module = tf.Module()
    specs = [tf.TensorSpec(SHAPE, name=name) for name in ("query", "key", "value")]
    module.train = tf.function(lambda *arrays: output_and_gradients(*arrays), input_signature=specs)
    tf.saved_model.save(module, tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    assert_near(loaded.train(*arrays), output_and_gradients(*arrays))
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        total = tf.reduce_sum(loaded.train(*arrays)[1] ** 2)
    with pytest.raises(tf.errors.InvalidArgumentError):
        tape.gradient(total, arrays)


WAYS = ({"implementation": "auto"}, {"implementation": "blockwise"}, {"arithmetic": "reproducible"})


@pytest.mark.parametrize("mode", ["fixed", "open", "xla"])
@pytest.mark.parametrize("options", WAYS, ids=lambda options: next(iter(options.values())))
def test_of_nothing_all_gradients_are_0(options, mode):
    """TensorFlow's optimizer of graphs ends the process where a product of sinks is differentiated as it stands."""
    sizes = tf.TensorSpec([None, None, None, 4])
    signature = [sizes, sizes, tf.TensorSpec([None]), tf.TensorSpec([None], tf.int32)]

    @tf.function(input_signature=None if mode == "fixed" else signature, jit_compile=mode == "xla")
    def gradients(*arrays):
        with tf.GradientTape() as tape:
            tape.watch(arrays[:3])
            query, key, sinks, lengths = arrays
            with_sinks = {} if "arithmetic" in options else {"sinks": sinks}
            attended = scaled_dot_product_attention(query, key, key, mask=KeyLengths(lengths), **options, **with_sinks)
        return attended, *tape.gradient(attended, arrays[:3], unconnected_gradients="zero")

    for empty in range(4):
        batch, heads, rows, columns = (size * (axis != empty) for axis, size in enumerate((1, 2, 3, 5)))
        query, key, sinks = (tf.zeros(dims) for dims in ((batch, heads, rows, 4), (batch, heads, columns, 4), heads))
        found = gradients(query, key, sinks, tf.fill([batch], 2))
        for each, array in zip(found, (query, query, key, sinks), strict=True):
            np.testing.assert_array_equal(each, tf.zeros_like(array))


def test_gradients_pass_over_integers(arrays):
    def steep(scores, batch, head, query, key, table, steepness):
        return scores * steepness + tf.cast(table[0], scores.dtype)

    def steepness_gradient(implementation):
        steepness = tf.constant(0.7)
        with tf.GradientTape() as tape:
            tape.watch(steepness)
            options = {"score_mod": ScoreMod(steep, (tf.constant([2, 5]), steepness)), "implementation": implementation}
            total = tf.reduce_sum(scaled_dot_product_attention(*arrays, **options) ** 2)
        return tape.gradient(total, steepness)

    np.testing.assert_allclose(steepness_gradient("blockwise"), steepness_gradient("dense"), rtol=1e-4)


ALL, KEYS = [None] * 4, [*SHAPE[:2], None, SHAPE[3]]  # the dimensions that no program knows


@pytest.mark.parametrize(
    ("function", "dims"),
    [
        (lambda x, **options: scaled_dot_product_attention(x, x, x, **options), ALL),
        (lambda x, **options: linear(Linear(tf.ones((5, 5))), x, **options), ALL),
        (lambda x, **options: attention_scores(x, x, **options), KEYS),
        (lambda x, **options: attention_weights(x, x, **options), KEYS),
    ],
)
def test_reproducible_sums_are_over_known_sizes(function, dims):
    run = tf.function(functools.partial(function, arithmetic="reproducible"), [tf.TensorSpec(dims)], autograph=False)
    with pytest.raises(ValueError):
        run(tf.ones(SHAPE))
