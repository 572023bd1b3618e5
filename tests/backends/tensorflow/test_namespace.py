"""The array API of TensorFlow tensors against that of NumPy, and of array_api_strict, which is the standard's own."""

import math

import array_api_strict as strict
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from tensorflow_helpers import DTYPES, FLOATING, INTEGRAL, MODES, SIGNED, assert_same, tensor

from attention_tensorflow import backend, namespace as xp


def by_standard(name, *arguments):
    """Call array_api_strict with NumPy arrays in place of its own."""
    strict_arguments = [strict.asarray(each) if isinstance(each, np.ndarray) else each for each in arguments]
    with np.errstate(all="ignore"):
        return np.asarray(getattr(strict, name)(*strict_arguments))


def elements(dtype, name=""):
    if dtype == "bool":
        return st.booleans()
    if dtype in FLOATING:
        return st.integers(-64, 64).map(lambda n: n / 8)
    if "shift" in name:
        return st.integers(0, 7)
    limits = np.iinfo(dtype)
    whole = st.integers(int(limits.min), int(limits.max))
    return st.integers(1, 9) if name in {"floor_divide", "remainder"} else whole


@st.composite
def pairs(draw, name, dtypes):
    shapes = draw(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3)).input_shapes
    first, second = draw(st.tuples(st.sampled_from(dtypes), st.sampled_from(dtypes)))
    return (
        draw(hnp.arrays(first, shapes[0], elements=elements(first))),
        draw(hnp.arrays(second, shapes[1], elements=elements(second, name))),
    )


ANY_NUMBER = ("add", "subtract", "multiply", "maximum", "minimum", "less", "less_equal", "greater", "greater_equal")

BINARY = (
    dict.fromkeys(ANY_NUMBER, INTEGRAL + FLOATING)
    | dict.fromkeys(("equal", "not_equal"), DTYPES)
    | dict.fromkeys(("logical_and", "logical_or"), ("bool",))
    | dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), ("bool", *INTEGRAL))
    | dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift", "floor_divide", "remainder"), INTEGRAL)
    | {"divide": FLOATING}
)


@pytest.mark.parametrize("name", BINARY)
@given(data=st.data())
def test_functions_of_two_arrays_agree_with_the_standard(name, data):
    first, second = data.draw(pairs(name, BINARY[name]))
    function = getattr(xp, name)
    try:
        expected = by_standard(name, first, second)
    except TypeError:
        with pytest.raises(TypeError):
            function(tensor(first), tensor(second))
    else:
        assert_same(function(tensor(first), tensor(second)), expected)


@pytest.mark.parametrize("first", DTYPES)
def test_promotion_follows_the_table_of_the_standard(first):
    for second in DTYPES:
        try:
            expected = strict.result_type(getattr(strict, first), getattr(strict, second))
        except TypeError:
            with pytest.raises(TypeError):
                xp.result_type(getattr(xp, first), getattr(xp, second))
        else:
            got = xp.result_type(getattr(xp, first), getattr(xp, second))
            assert strict.asarray(np.zeros((), got.name)).dtype == expected


def test_types_of_16_bits_promote_to_float32_and_wider():
    assert xp.result_type(xp.float16, xp.bfloat16) is xp.float32
    assert xp.result_type(xp.bfloat16, xp.float32) is xp.float32
    assert xp.result_type(xp.float16, xp.float64) is xp.float64
    with pytest.raises(TypeError):
        xp.result_type(xp.bfloat16, xp.int8)


def test_several_arrays_promote_together():
    assert xp.result_type(xp.uint8, tensor([1], "int8"), xp.int32, 3) is xp.int32
    with pytest.raises(ValueError):
        xp.result_type(1, 2.0)


@pytest.mark.parametrize("number", [True, 3, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_python_numbers_take_the_dtype_of_the_array(dtype, number):
    array = np.ones(2, dtype)
    for ordered in ((array, number), (number, array)):
        tensors = [tensor(each) if each is array else each for each in ordered]
        try:
            expected = by_standard("equal", *ordered)
        except TypeError:
            with pytest.raises(TypeError):
                xp.equal(*tensors)
        else:
            assert_same(xp.equal(*tensors), expected)
    if dtype in FLOATING and number is not True:
        assert_same(xp.multiply(tensor(array), number), np.multiply(array, number))
        assert_same(xp.subtract(number, tensor(array)), np.subtract(number, array))


def test_arrays_of_others_are_refused():
    for foreign in (np.ones(2, "float32"), [1.0, 2.0], 1j, None):
        with pytest.raises(TypeError):
            xp.add(tf.ones(2), foreign)


REAL = ("abs", "floor", "isfinite", "isinf", "isnan", "negative", "round", "sign", "square")

UNARY = (
    dict.fromkeys(REAL, INTEGRAL + FLOATING)
    | dict.fromkeys(("exp", "tanh", "sqrt", "log", "cos", "sin"), FLOATING)
    | {"logical_not": ("bool",), "bitwise_invert": ("bool", *INTEGRAL)}
)

SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -2.5, -0.5, 0.5, 1.5, 2.5, 3.0]


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.filterwarnings("ignore:invalid value|divide by zero:RuntimeWarning")
def test_functions_of_one_array_agree_with_the_standard(name):
    for dtype in UNARY[name]:
        values = SPECIAL if dtype in FLOATING else [False, True] if dtype == "bool" else [0, 1, 5, 100]
        array = np.asarray([values, values[::-1]], dtype)
        array = -array if dtype in SIGNED else array
        if name == "negative" and dtype not in SIGNED + FLOATING:
            expected = np.negative(array)  # undefined in the standard; wraps around as elsewhere
        else:
            expected = by_standard(name, array)
        accurate = dtype in FLOATING and name in {"exp", "tanh", "log", "cos", "sin"}
        assert_same(getattr(xp, name)(tensor(array)), expected, rtol=1e-6 if accurate else 0.0)


RNG = np.random.default_rng(0)
ARRAYS = {
    "x": RNG.integers(-9, 9, (2, 3, 4)).astype("float32"),
    "y": RNG.integers(-9, 9, (5, 3, 4)).astype("float32"),
    "n": np.asarray([[2**31 - 1, -(2**31), 0x1BD11BDA, -7]], "int32"),
    "at": np.asarray([1, 0, -1, 1], "int32"),
    "of": np.arange(32, dtype="int32")[:, None],
    "small": np.asarray([[1, 2, 3], [100, 90, 80], [4, 5, 6]], "int8"),
    "mask": np.asarray([[True], [False], [True]]),
}


def products(xp, x, y, small, **_):
    vector, turned = y[0, 0], xp.matrix_transpose(y)
    yield from (xp.matmul(vector, vector), xp.matmul(x, vector), xp.matmul(vector, xp.matrix_transpose(x)))
    yield from (xp.matmul(xp.expand_dims(x, axis=1), turned), xp.matmul(xp.expand_dims(x, axis=1), turned[0]))
    yield from (xp.matmul(x[:, :0], turned[0]), xp.matmul(x[..., :0], turned[0, :0]), xp.matmul(small, small))
    for axis in (-1, -2):
        yield xp.vecdot(xp.expand_dims(x, axis=1), y, axis=axis)
    yield xp.vecdot(small, small)


def reductions(xp, x, **_):
    for name in ("max", "min", "sum", "mean", "any", "all"):
        for axis in (None, 0, -1, (0, 2), ()):
            yield getattr(xp, name)(x, axis=axis)
        yield getattr(xp, name)(x, axis=1, keepdims=True)
    yield xp.sum(x, dtype=xp.float64)
    yield xp.sum(x[:, :0], axis=1)


def conversions(xp, x, n, of, small, mask, **_):
    yield from (xp.add(n, of), xp.subtract(n, of), xp.multiply(n, n), xp.negative(n))  # which wrap around
    yield from (xp.bitwise_right_shift(n, of), xp.bitwise_left_shift(n, of))
    yield from (xp.where(mask, small, n[:, :3]), xp.where(mask, small, 5), xp.where(mask, 5, small))
    yield from (xp.astype(n, xp.bool), xp.astype(mask, xp.float64), xp.astype(small, xp.float16))
    unsigned = xp.astype(small, xp.uint8)
    yield from (xp.pow(small, 2), xp.pow(unsigned, 6), xp.pow(unsigned, xp.astype(mask, xp.uint8)), xp.pow(x, 2))
    yield from (xp.isfinite(n), xp.full_like(x, 7), xp.zeros_like(x, dtype=xp.int8), xp.ones_like(small))


def shapes(xp, x, small, at, n, **_):
    rows, columns, _ = xp.shape(x)
    yield from (xp.reshape(x, (rows, 1, columns, 4)), xp.reshape(x, (4, -1)), xp.reshape(x[:1, :1, :1], ()))
    yield from (
        xp.permute_dims(x, axes=(2, 0, 1)),
        xp.matrix_transpose(x),
        xp.broadcast_to(x[:1], (5, rows, columns, 4)),
    )
    yield from (xp.squeeze(x[:1, :, :1], axis=(0, -1)), xp.squeeze(x[:1], axis=()), xp.flip(x, axis=-1))
    for axis in (0, 3, -4, -1):
        yield xp.expand_dims(x, axis=axis)
    yield from (
        xp.concat([small, n[:, :3]]),
        xp.concat([small, n], axis=None),
        xp.stack([small[:1], n[:, :3]], axis=-1),
    )
    yield xp.repeat(x, 2)
    for axis in (0, 1, -1):
        yield from (xp.repeat(x, 3, axis=axis), xp.take(x, at, axis=axis))
    yield from (
        xp.zeros((rows, 2), dtype=xp.float32),
        xp.ones((2, columns), dtype=xp.int8),
        xp.full((rows,), 7.0, dtype=xp.float16),
    )
    for start, stop, step in ((0, columns, 1), (rows, columns, 2), (columns, rows, 1), (columns, 0, -1), (-5, rows, 3)):
        yield xp.arange(start, stop, step, dtype=xp.int32)


@pytest.mark.parametrize("mode", [*MODES, "variables"])
@pytest.mark.parametrize("calls", [products, reductions, conversions, shapes], ids=lambda each: each.__name__)
def test_functions_are_those_of_numpy_in_every_mode(calls, mode):
    """Compiled, no dimension is known; variables stand for their values."""

    def run(*tensors):
        return list(calls(xp, **dict(zip(ARRAYS, tensors, strict=True))))

    tensors = [tf.Variable(each) if mode == "variables" else each for each in map(tensor, ARRAYS.values())]
    if mode in ("graph", "xla"):
        signature = [tf.TensorSpec([None] * each.shape.rank, each.dtype) for each in tensors]
        run = tf.function(run, input_signature=signature, jit_compile=mode == "xla", autograph=False)
    expected = list(calls(np, **ARRAYS))
    for at, (found, wanted) in enumerate(zip(run(*tensors), expected, strict=True)):
        try:
            assert_same(found, wanted, rtol=1e-6)
        except AssertionError as error:
            error.add_note(f"of result {at}")
            raise


def test_erfc_is_that_of_the_c_library():
    points = [-2.0, -0.1, 0.0, 0.5, 5.0]
    assert_same(xp.erfc(tensor(points)), [math.erfc(x) for x in points], rtol=1e-13)


@pytest.mark.parametrize("known", [True, False])
def test_products_of_batches_and_a_matrix_can_be_added_to(known):
    """Which crashed within oneDNN once the graph was optimized, at the second call."""
    rng = np.random.default_rng(0)
    first, second, third = (
        rng.integers(-9, 9, shape).astype("float32") for shape in ((4, 1, 6, 3), (3, 5), (4, 1, 6, 5))
    )
    spec = tf.TensorSpec(first.shape if known else (None, 1, None, None))
    add = tf.function(lambda x: xp.add(tensor(third), xp.matmul(x, tensor(second))), input_signature=[spec])
    for _ in range(3):
        assert_same(add(tensor(first)), third + first @ second)


@pytest.mark.parametrize(
    ("dtype", "wide"), [("int8", "int32"), ("int16", "int32"), ("uint8", "uint32"), ("int64", "int64")]
)
def test_sums_of_small_integers_have_32_bits(dtype, wide):
    assert_same(xp.sum(tensor([100, 100, 100], dtype)), np.asarray(300, wide))


@pytest.mark.parametrize("mode", MODES)
def test_clipping_keeps_nan(mode):
    array = np.asarray([math.nan, -3.0, 0.5, 9.0] * 2, "float32")
    low, high = np.asarray([-1.0], "float32"), np.asarray([1.5], "float32")

    def clipped(x, low, high):
        return xp.clip(x, low, high), xp.clip(x, low), xp.clip(x, max=high), xp.clip(x, -1, 1.5), xp.clip(x)

    got = backend.compile(clipped, mode=mode)(tensor(array), tensor(low), tensor(high))
    both = np.clip(array, low, high)
    for result, expected in zip(got, (both, np.maximum(array, low), np.minimum(array, high), both, array), strict=True):
        assert_same(result, expected)


def test_impossible_axes_are_named():
    with pytest.raises(ValueError):
        xp.squeeze(tf.ones((2, 3)), 0)
    for axis in (3, -4):
        with pytest.raises(IndexError):
            xp.expand_dims(tf.ones((2, 3)), axis=axis)


def test_python_numbers_become_float32_int32_and_bool():
    assert_same(xp.asarray([[1, 2], [3, 4]]), np.asarray([[1, 2], [3, 4]], "int32"))
    assert_same(xp.asarray(0.1), np.asarray(0.1, "float32"))
    assert_same(xp.asarray([True, 2]), np.asarray([1, 2], "int32"))
    assert_same(xp.asarray([]), np.zeros(0, "float32"))
    assert_same(xp.full(2, True), np.ones(2, "bool"))
    assert_same(xp.full((2,), 7), np.full(2, 7, "int32"))
    assert_same(xp.zeros((2, 0)), np.zeros((2, 0), "float32"))
    assert_same(xp.ones(()), np.ones((), "float32"))


def test_asarray_keeps_or_converts_the_dtype_without_loss():
    assert_same(xp.asarray(0.1, dtype=xp.float64), np.asarray(0.1))
    assert_same(xp.asarray(np.asarray([1.0, 2.0])), np.asarray([1.0, 2.0]))
    assert_same(xp.asarray(tf.ones(2), dtype=xp.int8), np.ones(2, "int8"))
    assert_same(xp.asarray([0.1], dtype=xp.bfloat16), np.asarray([0.1], ml_dtypes.bfloat16))
    assert_same(xp.astype(tensor([0, 1]), xp.bfloat16), np.asarray([0, 1], ml_dtypes.bfloat16))
    assert xp.matmul(tf.ones((2, 2), tf.bfloat16), tf.ones((2, 2))).dtype is xp.float32
    with pytest.raises(TypeError):
        xp.where(tensor([True]), tensor([1], "int8"), 0.5)
    with pytest.raises(ValueError):
        xp.asarray([1], copy=False)


def test_a_tape_records_what_is_read_of_a_variable_that_is_trained():
    trained, fixed = (tf.Variable(0.5, trainable=trainable) for trainable in (True, False))
    with tf.GradientTape():
        assert [backend.has_gradient(x) for x in (trained, fixed, tf.constant(0.5))] == [True, False, False]
    assert not backend.has_gradient(trained)
