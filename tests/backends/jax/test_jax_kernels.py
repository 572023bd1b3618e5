"""JAX's kernel, which is cuDNN's: run here by another implementation of the same function, as it needs a GPU."""

import math

import numpy as np
import pytest

import attention_core as ac
from attention_core.backend import Call

B, H, G, M, N, D = 1, 4, 2, 8, 9, 16
SHAPES = (B, H, M, D), (B, G, N, D), (B, G, N, D)


@pytest.fixture(autouse=True)
def only_jax(backend):
    if backend.name != "jax":
        pytest.skip("about the kernel of JAX")


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


@pytest.fixture
def taken(jax, monkeypatch):
    """How often the kernel ran: cuDNN is replaced by XLA, which lets what is masked leak just the same."""
    runs = []
    kernel = jax.nn.dot_product_attention

    def run(*arrays, implementation, **options):
        assert implementation == "cudnn"
        jax.debug.callback(lambda: runs.append("kernel"))
        return kernel(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", run)
    return runs


def outcome(jax, backend, arrays, attend):
    """Output and gradients, as NumPy arrays of float64."""

    def measure(*arrays):
        output = attend(*arrays)
        return output.astype("float32").sum(), output

    gradients, output = jax.jit(jax.grad(measure, argnums=(0, 1, 2), has_aux=True))(*arrays)
    jax.effects_barrier()
    return [np.asarray(x, dtype="float64") for x in (output, *gradients)]


def spoil(arrays, argument, number):
    """Change the last key, which a causal mask hides from every query."""
    arrays[argument][:, :, -1] = number
    return arrays


CASES = [
    ("ordinary numbers", 2, 1.0, None, True),
    ("a value that is huge", 2, 2e38, None, False),
    ("a value that is nan", 2, math.nan, None, False),
    ("a key that is infinite", 1, math.inf, None, False),
    ("a product that overflows", 1, 3e38, None, False),
    ("a scale that makes a product overflow", 1, 1e20, 1e20, False),
    ("a scale in an array that makes a product overflow", 1, 1e20, np.float32(1e20), False),
]


@pytest.mark.parametrize(("what", "argument", "number", "scale", "kernel"), CASES, ids=[case[0] for case in CASES])
def test_the_kernel_runs_only_if_nothing_masked_can_leak(
    what, argument, number, scale, kernel, jax, backend, rng, taken
):
    """Under `lax.cond`, forward and backward: the answer is that of the definition either way."""
    from attention_jax.kernels import DotProduct

    arrays = spoil([rng.standard_normal(shape) for shape in SHAPES], argument, number)
    scale = jax.numpy.asarray(scale) if isinstance(scale, np.float32) else scale
    arrays = backend.from_numpy(arrays, dtype="bfloat16")

    def attend(*arrays):
        call = Call(*arrays, backend.namespace, backend, mask=ac.Causal(), scale=scale)
        return DotProduct().attend(call)

    def defined(*arrays):
        options = {"mask": ac.Causal(), "scale": scale, "implementation": "dense"}
        return ac.scaled_dot_product_attention(*arrays, **options)

    found, expected = (outcome(jax, backend, arrays, each) for each in (attend, defined))
    assert bool(taken) == kernel
    assert all(np.isfinite(x).all() for x in found)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0.05, atol=0.05 * max(1.0, np.abs(y).max()))


def test_the_kernel_itself_lets_a_huge_value_leak_into_gradients(jax, backend, rng, taken):
    """Which is why values are bounded, too: the cotangent of a masked weight is infinite, and 0 times that is nan."""
    from attention_jax import kernels

    arrays = spoil([rng.standard_normal(shape) for shape in SHAPES], 2, 2e38)
    arrays = backend.from_numpy(arrays, dtype="bfloat16")

    def attend(*arrays):
        return kernels._cudnn(Call(*arrays, backend.namespace, backend, mask=ac.Causal())) * 64

    _, *gradients = outcome(jax, backend, arrays, attend)
    assert taken
    assert any(np.isnan(x).any() for x in gradients)
