"""Results stay where the arrays are, shown without an accelerator: on devices that are made up, or cut from the CPU."""

import os
import textwrap

import numpy as np
import pytest
from backend_helpers import run
from call_table import Sizes, options_of

import attention_core as ac
from attention_core.backend import get_backend

SIZES = Sizes((2,), 4, 2, 3, 5, 7, 6)
QUERY, KEY, _ = ARRAYS = [array.astype("float32") for array in SIZES.arrays(np.random.default_rng(0))]
CASES = ("none", "causal", "array of keys", "lengths", "cache", "length", "segments", "window", "or lengths",
         "array and rule", "bias and mask", "numbers", "dropout")  # fmt: skip


def attend(put, case):
    narrow = {"float64": "float32", "int64": "int32"}  # not every device has wider numbers
    options = options_of(case, SIZES, lambda x: put(np.asarray(x, narrow.get(x.dtype.name))))
    arrays = (put(array) for array in ARRAYS)
    return ac.scaled_dot_product_attention(*arrays, return_weights=True, return_logsumexp=True, **options)


def expected(case):
    return attend(get_backend("numpy").from_numpy, case)


def assert_close(actual, desired):
    for array, goal in zip(actual, desired, strict=True):
        np.testing.assert_allclose(array, goal, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_results_stay_on_the_device(backend, case):
    for device in backend.devices():
        put = lambda array, device=device: backend.from_numpy(array, device=device)  # noqa: E731
        results = attend(put, case)
        assert {str(result.device) for result in results} == {str(put(QUERY).device)}
        if backend.is_concrete(results.output):
            assert_close(backend.to_numpy(results), expected(case))


def test_scores_and_masks_stay_on_the_device(backend):
    for device in backend.devices():
        query, key, lengths = backend.from_numpy((QUERY, KEY, np.asarray([4, 0], "int32")), device=device)
        mask = ac.KeyLengths(lengths).to_array(1, SIZES.columns, like=lengths, xp=backend.namespace)
        scores = ac.attention_scores(query, key, mask=mask)
        assert str(mask.device) == str(scores.device) == str(query.device)


# The case of the tests above, for scripts that need an interpreter of their own.
PREAMBLE = """
import numpy as np
from attention_core import KeyLengths, scaled_dot_product_attention
from attention_core.backend import get_backend

def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")

def attend(query, key, value, lengths):
    mask = KeyLengths(lengths)
    return scaled_dot_product_attention(query, key, value, mask=mask, is_causal=True, return_logsumexp=True)

def check(result):
    desired = attend(*arrays())
    for name in ("output", "logsumexp"):
        actual = backend.to_numpy(getattr(result, name))
        np.testing.assert_allclose(actual, getattr(desired, name), rtol=2e-5, atol=2e-6)

def arrays():
    return random(2, 4, 3, 7), random(2, 2, 5, 7), random(2, 2, 5, 6), np.arange(2, dtype="int32")
"""


def run_on(script: str, **environment: str) -> None:
    run(PREAMBLE + textwrap.dedent(script), **environment)


@pytest.mark.needs("jax")
def test_jax_results_stay_on_one_of_many_devices():
    run_on(
        """
        import jax
        backend = get_backend("jax")
        assert backend.devices() == [f"cpu:{index}" for index in range(8)]
        placed = backend.from_numpy(arrays(), device="cpu:3")
        for mode in backend.modes:
            result = backend.compile(attend, mode=mode)(*placed)
            assert result.output.devices() == result.logsumexp.devices() == {jax.devices()[3]}, mode
            check(result)
        moved = jax.device_put(placed, jax.devices()[5])
        assert attend(*moved).output.devices() == {jax.devices()[5]}
        """,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8",
    )


@pytest.mark.needs("tensorflow")
def test_tensorflow_results_stay_where_its_scope_says():
    run_on(
        """
        import tensorflow as tf
        parts = [tf.config.LogicalDeviceConfiguration() for _ in range(3)]
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
        backend = get_backend("tensorflow")
        last = backend.devices()[2]
        placed = backend.from_numpy(arrays(), device=last)
        xp, here = backend.namespace, tf.ones(2)
        made = [xp.zeros(2, device=last), xp.ones(2, device=last), xp.full(2, 1.0, device=last), *placed,
            xp.zeros_like(here, device=last), xp.arange(3, device=last), xp.asarray([1], device=last),
            xp.asarray(here, device=last)]
        assert all(array.device.endswith("CPU:2") for array in made)
        assert here.device.endswith(backend.devices()[0])
        for mode in backend.modes:
            function = backend.compile(attend, mode=mode)
            check(function(*placed))  # TensorFlow alone decides where to compute, whatever the arrays
            with tf.device(last):
                result = function(*placed)
            assert {result.output.device, result.logsumexp.device} == {placed[0].device}, mode
            check(result)
        """,
        TF_CPP_MIN_LOG_LEVEL="2",
    )


@pytest.mark.needs("torch")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_torch_computes_dtypes_without_values(dtype):
    backend = get_backend("torch")
    import torch

    output, weights, logsumexp = attend(lambda array: backend.from_numpy(array, device="meta", dtype=dtype), "causal")
    assert output.dtype == weights.dtype == getattr(torch, dtype)
    assert logsumexp.dtype == (torch.float64 if dtype == "float64" else torch.float32)
