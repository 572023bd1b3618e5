"""Self-attention over feature maps, and spectral normalization."""

import functools

import numpy as np
import pytest
from backend_helpers import close as near
from blockwise_helpers import quickly

import attention_core as ac
from attention_core import layers
from attention_core.layers import named_arrays
from attention_core.parameters import Linear, SaganAttention

close = functools.partial(near, ulps=64)

HEIGHT, WIDTH, C, D, E = 4, 6, 8, 2, 3


def affine(rng, *shape, bias=False):
    return Linear(rng.standard_normal(shape) / 2, rng.standard_normal(shape[1]) if bias else None)


def place_by_place(p, x, pool):
    """The formula for one feature map (height, width, C), one place at a time."""
    height, width, _ = x.shape

    def convolved(q, row, column):
        return x[row, column] @ q.weight + (0 if q.bias is None else q.bias)

    def attended(q):
        every = [[convolved(q, r, c) for c in range(width)] for r in range(height)]
        if not pool:
            return [position for row in every for position in row]
        squares = [(r, c) for r in range(0, height - 1, 2) for c in range(0, width - 1, 2)]
        return [
            np.max([every[r][c], every[r + 1][c], every[r][c + 1], every[r + 1][c + 1]], axis=0) for r, c in squares
        ]

    phi, g = np.array(attended(p.phi)), np.array(attended(p.g))
    y, weights = np.empty_like(x), []
    for r in range(height):
        for c in range(width):
            s = phi @ convolved(p.theta, r, c)
            weights.append(np.exp(s - s.max()) / np.exp(s - s.max()).sum())
            found = weights[-1] @ g
            y[r, c] = (
                found if p.output is None else found @ p.output.weight + (0 if p.output.bias is None else p.output.bias)
            )
    return x + p.sigma * y, np.array(weights)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("output", [True, False])
@pytest.mark.parametrize(
    ("pool", "places", "sigma"),
    [(True, (4, 6), [0.7]), (False, (4, 6), 0.7), (True, (5, 6), 0.7), (True, (4, 7), [0.7]), (False, (1, 3), 0.7)],
)
def test_equals_the_formula_place_by_place(rng, put, get, pool, places, sigma, output, bias):
    width = E if output else C
    maps = [affine(rng, *shape, bias=bias) for shape in ((C, D), (C, D), (C, width))]
    p = SaganAttention(*maps, affine(rng, E, C, bias=bias) if output else None, np.asarray(sigma))
    x = rng.standard_normal((2, *places, C))
    result = ac.functions.sagan_attention(put(p), put(x), pool=pool, return_weights=True)
    expected = [place_by_place(p, sample, pool) for sample in x]
    close(get(result.output), np.stack([y for y, _ in expected]))
    close(get(result.weights), np.stack([w for _, w in expected])[:, None])
    np.testing.assert_array_equal(get(ac.functions.sagan_attention(put(p), put(x), pool=pool)), get(result.output))


def parameters(rng, sigma=0.7):
    return SaganAttention(affine(rng, C, D), affine(rng, C, D), affine(rng, C, E), affine(rng, E, C), np.asarray(sigma))


def test_sigma_zero_gives_the_input_bit_for_bit(rng, put, get):
    x = rng.standard_normal((2, HEIGHT, WIDTH, C))
    np.testing.assert_array_equal(get(ac.functions.sagan_attention(put(parameters(rng, 0.0)), put(x))), x)


def test_spectral_norm_is_one_step_of_power_iteration(rng, put, get):
    w, u = rng.standard_normal((3, 3, 4, 5)), rng.standard_normal(5)
    matrix = w.reshape(36, 5)
    v = matrix @ u / (np.linalg.norm(matrix @ u) + 1e-12)
    new_u = matrix.T @ v / (np.linalg.norm(matrix.T @ v) + 1e-12)
    normalized, got_u = get(ac.functions.spectral_norm(put(w), put(u)))
    close(got_u, new_u)
    close(normalized, w / (v @ matrix @ new_u))


def test_spectral_norm_converges_to_the_largest_singular_value(rng, put, get):
    w, u = rng.standard_normal((6, 5)), rng.standard_normal(5)
    normalized, _ = get(ac.functions.spectral_norm(put(w), put(u), iterations=300))
    close(np.linalg.svd(normalized, compute_uv=False)[:1], np.ones(1), ulps=4096)


@pytest.mark.needs("gradients")
def test_gradients_of_both_arithmetics_agree(backend, rng):
    p = SaganAttention(*(affine(rng, *shape, bias=True) for shape in ((C, D), (C, D), (C, E), (E, C))), np.asarray(0.3))
    p, x = backend.from_numpy((p, rng.standard_normal((1, HEIGHT, WIDTH, C))), dtype="float32")
    xp, found = backend.namespace, []
    for arithmetic in ("fast", "reproducible"):

        def loss(p, x, arithmetic=arithmetic):
            y = ac.functions.sagan_attention(p, x, arithmetic=arithmetic)
            return xp.sum(xp.multiply(y, y))

        d_parameters, d_x = backend.to_numpy(quickly(backend, backend.value_and_grad(loss))(p, x)[1])
        found.append({**named_arrays(d_parameters), "x": d_x})
    largest = max(np.abs(fast).max() for fast in found[0].values())
    for name, fast in found[0].items():  # that of phi.bias is 0: of it there is only what rounding leaves
        bound = 1e-5 * np.abs(fast).max() + 1e-7 * largest
        np.testing.assert_allclose(found[1][name], fast, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize("arithmetic", ["fast", "reproducible"])
@pytest.mark.needs("float16")
def test_a_state_keeps_a_dtype_of_its_own(arithmetic, xp, put, get):
    """As under policies that cast parameters for a call, and nothing else."""
    layer = layers.SaganAttention(8, arithmetic=arithmetic)
    p, state, x = layer.init(0, xp=np), put(layer.init_state(0, xp=np)), np.ones((1, 4, 4, 8), np.float16)
    p = put(p._replace(sigma=p.sigma + 0.5), dtype="float16")
    assert layer(p, put(x), state=state).dtype == xp.float16
    after = layers.named_arrays(layer.updated_state(p, state))
    wide = layers.tree_from_names(p, {k: xp.astype(a, xp.float32) for k, a in layers.named_arrays(p).items()})
    for name, expected in layers.named_arrays(layer.updated_state(wide, state)).items():
        assert after[name].dtype == xp.float32
        np.testing.assert_array_equal(get(after[name]), get(expected))
