"""JAX's kernel, which is cuDNN's: run here by another implementation of the same function, as it needs a GPU."""

import math

import numpy as np
import pytest
from backend_helpers import imported

import attention_core as ac
from attention_core.backend import Call, get_backend

NUMPY = get_backend("numpy")
B, H, G, M, N, D = 1, 4, 2, 8, 9, 16
SHAPES = (B, H, M, D), (B, G, N, D), (B, G, N, D)


jax = imported("jax")


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
    ("ordinary numbers", 2, 1.0, True),
    ("a value that is huge", 2, 2e38, False),
    ("a value that is nan", 2, math.nan, False),
    ("a key that is infinite", 1, math.inf, False),
    ("a product that overflows", 1, 3e38, False),
]


@pytest.mark.parametrize(("what", "argument", "number", "kernel"), CASES, ids=[case[0] for case in CASES])
def test_who_asks_for_a_look_gets_the_kernel_only_if_nothing_masked_can_leak(
    what, argument, number, kernel, jax, backend, rng, taken
):
    """Under `lax.cond`, forward and backward: the answer is that of the definition either way."""
    from attention_jax.kernels import DotProduct

    arrays = spoil([rng.standard_normal(shape) for shape in SHAPES], argument, number)
    arrays = backend.from_numpy(arrays, dtype="bfloat16")

    def attend(*arrays):
        call = Call(*arrays, backend.namespace, backend, mask=ac.Causal(), assume_finite=False)
        return DotProduct().attend(call)

    def defined(*arrays):
        options = {"mask": ac.Causal(), "implementation": "dense"}
        return ac.scaled_dot_product_attention(*arrays, **options)

    found, expected = (outcome(jax, backend, arrays, each) for each in (attend, defined))
    assert bool(taken) == kernel
    assert all(np.isfinite(x).all() for x in found)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0.05, atol=0.05 * max(1.0, np.abs(y).max()))


@pytest.mark.parametrize(("length", "with_causal"), [(0, False), (3, True)])
def test_what_lengths_hide_from_all_queries_reaches_nothing(length, with_causal, jax, backend, rng, put, taken):
    from attention_jax.kernels import DotProduct

    lengths = ac.KeyLengths(put(np.asarray([length])))
    mask = lengths & ac.Causal() if with_causal else lengths
    arrays = [rng.standard_normal(shape) for shape in SHAPES]
    for array in arrays[1:]:
        array[:, :, length:] = math.nan
    arrays = backend.from_numpy(arrays, dtype="bfloat16")

    def attend(*arrays):
        return DotProduct().attend(Call(*arrays, backend.namespace, backend, mask=mask))

    def defined(*arrays):
        return ac.scaled_dot_product_attention(*arrays, mask=mask, implementation="dense")

    found, expected = (outcome(jax, backend, arrays, each) for each in (attend, defined))
    assert taken
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0.05, atol=0.05)


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


L = 10
STRUCTURES = {
    "window": (
        lambda put: {"mask": ac.SlidingWindow(left=3, right=0)},
        {"local_window_size": (3, 0), "is_causal": True},
    ),
    "window without an end": (lambda put: {"mask": ac.SlidingWindow(right=0)}, {"is_causal": True}),
    "lengths": (lambda put: {"mask": ac.KeyLengths(put(np.asarray([0, 7])))}, {"is_causal": False}),
    "length": (lambda put: {"mask": ac.KeyLengths(4)}, {"is_causal": False}),
    "causal and lengths": (
        lambda put: {"mask": ac.KeyLengths(put(np.asarray([3, 0]))) & ac.Causal()},
        {"is_causal": True},
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure_is_handed_to_the_kernel(name, jax, backend, rng, put, monkeypatch):
    """Numbers are those of the definition, fully masked rows included."""
    from attention_jax import kernels

    handed = []
    kernel = jax.nn.dot_product_attention

    def run(*arrays, implementation, **options):
        handed.append(options)
        return kernel(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", run)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    make, expected = STRUCTURES[name]
    plain = NUMPY.from_numpy([rng.standard_normal((2, heads, L, D)) for heads in (H, G, G)], dtype="bfloat16")
    call = Call(*put(plain), backend.namespace, backend, **make(put), assume_finite=True)  # nothing is cleared
    assert kernels.DotProduct().judge(call).refusal is None
    with jax.disable_jit():
        found = kernels.DotProduct().attend(call)
    assert {key: handed[0].get(key) for key in expected} == expected
    assert ("key_value_seq_lengths" in handed[0]) == ("length" in name)
    assert np.min(handed[0].get("key_value_seq_lengths", 1)) > 0  # cuDNN has no answer to a row without a key
    defined = ac.scaled_dot_product_attention(*plain, **make(NUMPY.from_numpy), implementation="dense")
    np.testing.assert_allclose(found.astype("float32"), defined.astype("float32"), rtol=0.02, atol=0.02)
    empty = (defined == 0).all(axis=-1)
    np.testing.assert_array_equal(np.asarray(found.astype("float32") == 0).all(axis=-1), empty)


def test_each_refusal_says_why(jax, backend, put, rng, monkeypatch):
    """The guard as a table."""
    from attention_jax.kernels import DotProduct

    def refusal(arrays, **options):
        return DotProduct().judge(Call(*arrays, backend.namespace, backend, **options)).refusal

    arrays = [put(rng.standard_normal((2, heads, L, D)), dtype="bfloat16") for heads in (H, G, G)]
    query, key, value = arrays
    bias = put(np.zeros((L, L)), dtype="bfloat16")
    assert refusal(arrays) == "needs a GPU"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for inputs, options, reason in (
        (arrays, {}, None),
        ([x.astype("float32") for x in arrays], {}, "computes in float16 or bfloat16 alone"),
        (arrays, {"softcap": 2.0}, "has no softcap"),
        (arrays, {"score_mod": ac.scores.alibi(H)}, "has no score_mod"),
        (arrays, {"dropout": ac.Dropout(0.5, 3)}, "drops no weights"),
        (arrays, {"mask": ac.Causal(offset=1)}, "takes no mask of the kind rule"),
        (arrays, {"mask": ac.Causal(offset=put(np.asarray(1)))}, "takes no mask of the kind rule"),
        (arrays, {"mask": ac.SlidingWindow(left=3)}, "takes no mask of the kind rule"),
        (
            arrays,
            {"mask": ac.SlidingWindow(left=3, right=0) & ac.KeyLengths(3)},
            "is not known to count windows and lengths",
        ),
        ((query[:, :, :4], key, value), {"mask": ac.SlidingWindow(left=3, right=0)}, "is not known to count windows"),
        (arrays, {"starts": (1, 0)}, "counts positions from 0"),
        ((query, key, value[..., :8]), {}, "takes values as wide as keys"),
        (arrays, {"bias": bias}, "has no bias"),
    ):
        found = refusal(inputs, **options)
        assert found == reason if reason is None else found.startswith(reason), (options, found)
