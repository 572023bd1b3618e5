"""Affine maps, normalization, feed-forward and embeddings, each against its formula in NumPy's float64."""

import mpmath
import numpy as np
import pytest
from backend_helpers import close
from blockwise_helpers import quickly

import attention_core as ac
from attention_core.parameters import Embeddings, FeedForward, GatedFeedForward, LayerNorm, Linear


def normalized(x, scale, offset, epsilon):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + epsilon) * scale + offset


FORMULAS = {
    "relu": lambda x: mpmath.mpf(max(x, 0)),
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "gelu": lambda x: x * mpmath.ncdf(x),
    "gelu_tanh": lambda x: x / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))),
    "cap": lambda x: 20 * mpmath.tanh(x / 20),
}


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0, 3)])
def test_linear_is_x_times_weight_plus_bias(rng, put, get, leading):
    x, weight, bias = rng.standard_normal((*leading, 5)), rng.standard_normal((5, 7)), rng.standard_normal(7)
    close(get(ac.functions.linear(put(Linear(weight, bias)), put(x))), x @ weight + bias)
    close(get(ac.functions.linear(put(Linear(weight)), put(x))), x @ weight)


@pytest.mark.parametrize("epsilon", [1e-5, 1e-12, 0.5])
def test_layer_norm_puts_epsilon_under_the_root(rng, put, get, epsilon):
    x, scale, offset = rng.standard_normal((2, 3, 5)) * 1e-2, rng.standard_normal(5), rng.standard_normal(5)
    expected = normalized(x, scale, offset, epsilon)
    close(get(ac.functions.layer_norm(put(LayerNorm(scale, offset)), put(x), epsilon=epsilon)), expected, ulps=64)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layer_norm_of_a_constant_row_is_zero(put, get, dtype):
    """Whatever the library's mean of equal numbers rounds to."""
    x, norm = put(np.full((1, 768), 1000.1), dtype=dtype), put(LayerNorm(np.ones(768), np.zeros(768)), dtype=dtype)
    assert np.abs(get(ac.functions.layer_norm(norm, x, epsilon=1e-12))).max() < 1e-3


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
def test_ids_may_be_of_any_integer_type(rng, put, get, dtype):
    e, ids = tables(rng), np.array([[3, 0, 10]])
    expected = get(ac.functions.embed_tokens(put(e), put(ids)))
    np.testing.assert_array_equal(get(ac.functions.embed_tokens(put(e), put(ids.astype(dtype)))), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("arithmetic", ["fast", "reproducible"])
def test_gated_feed_forward_multiplies_two_maps(activation, arithmetic, rng, put, get):
    shapes = ((5, 11), (11,), (5, 11), (11,), (11, 3), (3,))
    wg, bg, w1, b1, w2, b2 = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    x = rng.standard_normal((2, 4, 5)).astype(np.float32)
    parameters = put(GatedFeedForward(Linear(wg, bg), Linear(w1, b1), Linear(w2, b2)), dtype="float32")
    result = ac.functions.feed_forward(
        parameters, put(x, dtype="float32"), activation=activation, arithmetic=arithmetic
    )
    f = np.vectorize(lambda x: float(FORMULAS[activation](mpmath.mpf(x))))
    wg, bg, w1, b1, w2, b2, x = (each.astype(np.float64) for each in (wg, bg, w1, b1, w2, b2, x))
    np.testing.assert_allclose(get(result), (f(x @ wg + bg) * (x @ w1 + b1)) @ w2 + b2, rtol=0, atol=2e-5)


@pytest.mark.parametrize("arithmetic", ["fast", "reproducible"])
@pytest.mark.parametrize("name", ["gelu_tanh", "cap", "silu"])
def test_maps_and_their_gradients_are_right_at_all_magnitudes(name, arithmetic, backend):
    """They neither overflow nor give NaN."""
    xp, formula, far = backend.namespace, FORMULAS[name], [-1e30, -200.0, -90.0, -1e-3, 0.0, 1e-3, 90.0, 200.0, 1e30]
    x = np.asarray(far + ([-3.0, 3.0] if name == "silu" else [-9.0, -2.5, 0.4, 5.0]), dtype=np.float32)
    one = backend.from_numpy(np.ones((1, 1), np.float32))

    def function(x):
        """Of columns, with nothing else around it."""
        if name == "cap":
            return ac.attention_scores(x, one[None, ...], scale=1.0, softcap=20.0, arithmetic=arithmetic)
        return ac.functions.feed_forward(
            FeedForward(Linear(one), Linear(one)), x, activation=name, arithmetic=arithmetic
        )

    with mpmath.workdps(40):
        exact = [formula(mpmath.mpf(float(v))) for v in x]
        derivative = [
            mpmath.diff(formula, mpmath.mpf(float(v))) if abs(v) < 1e3 else (v > 0) * (name != "cap") for v in x
        ]
    value = backend.to_numpy(function(backend.from_numpy(x[None, :, None])))[0, :, 0]
    np.testing.assert_allclose(value, np.asarray(exact, float), rtol=1e-5, atol=1e-35)  # of exp at large numbers
    if backend.differentiates:
        gradients = quickly(backend, backend.value_and_grad(lambda x: xp.sum(function(x))))
        gradient = backend.to_numpy(gradients(backend.from_numpy(x[None, :, None]))[1][0])[0, :, 0]
        close = {"rtol": 1e-6, "atol": 1e-35} if name == "silu" else {"rtol": 4e-6, "atol": 1e-6}
        np.testing.assert_allclose(gradient, np.asarray(derivative, float), **close)


@pytest.mark.parametrize(
    ("arithmetic", "dtype"), [("fast", "float32"), ("fast", "float64"), ("reproducible", "float32")]
)
def test_silu_is_exact_from_the_least_to_the_greatest_numbers(arithmetic, dtype, put, get):
    """Neither a warning nor a loss of digits, where exponentials overflow or vanish."""
    x = np.concatenate([np.linspace(-85, 85, 401), [-1e30, -200.0, -1e-30, 0.0, 1e-30, 200.0, 1e30]]).astype(dtype)
    result = get(ac.functions.silu(put(x, dtype=dtype), arithmetic=arithmetic))
    with mpmath.workdps(30):
        expected = np.asarray([float(mpmath.mpf(float(v)) / (1 + mpmath.exp(-mpmath.mpf(float(v))))) for v in x])
    most = 0.51 if arithmetic == "reproducible" else 4
    tiny = float(np.finfo(dtype).tiny)
    assert (np.abs(result - expected) <= most * np.spacing(np.abs(expected).astype(dtype)) + tiny).all()


def tables(rng):
    norm = LayerNorm(rng.standard_normal(4), rng.standard_normal(4))
    return Embeddings(*(rng.standard_normal((rows, 4)) for rows in (11, 7, 3)), norm)


def test_embeddings_add_rows_and_normalize(rng, put, get):
    e, ids, places, segments = (
        tables(rng),
        np.array([[3, 0, 10], [1, 1, 2]]),
        np.array([6, 0, 2]),
        np.array([[2, 0, 1]]),
    )
    expected = normalized(e.token[ids] + e.position[places] + e.segment[segments], *e.norm, 1e-12)
    result = ac.functions.embed_tokens(put(e), put(ids), position_ids=put(places), segment_ids=put(segments))
    close(get(result), expected, ulps=64)


def test_positions_and_segments_have_defaults(rng, put, get):
    e, ids = tables(rng), np.array([[3, 0, 10], [1, 1, 2]])
    expected = normalized(e.token[ids] + e.position[:3] + e.segment[0], *e.norm, 1e-12)
    close(get(ac.functions.embed_tokens(put(e), put(ids))), expected, ulps=64)
    plain = Embeddings(e.token, e.position)
    close(get(ac.functions.embed_tokens(put(plain), put(ids))), e.token[ids] + e.position[:3])
