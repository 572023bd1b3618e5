"""What a user has NumPy do about numbers that overflow or vanish changes nothing, and is as before afterwards."""

import numpy as np
import pytest
from tracing_helpers import CASES, case, leaves

import attention_core as ac
from attention_core.initializers import normal
from attention_numpy.trees import map_arrays

LARGE = 60.0  # by which scores are as far apart as weights are small
MORE = {
    "blocks": {"implementation": "blockwise", "is_causal": True},
    "reproducible": {"arithmetic": "reproducible", "is_causal": True},
}


def enlarged(tree):
    return map_arrays(lambda leaf: leaf * leaf.dtype.type(LARGE) if leaf.dtype.kind == "f" else leaf, tree)


def same_under_errors(function, *arrays):
    expected = leaves(function(*arrays))
    with np.errstate(all="raise"):
        found = leaves(function(*arrays))
        assert set(np.geterr().values()) == {"raise"}
    for result, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("name", CASES)
def test_functions_compute_the_same_where_underflow_is_an_error(name):
    function, arrays = case(name, "numpy", "float32")
    same_under_errors(function, *enlarged(tuple(arrays)))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("options", MORE.values(), ids=MORE)
def test_every_way_to_compute_does(rng, options, dtype):
    arrays = enlarged((rng.normal(size=(2, 3, 40, 4)).astype(dtype),) * 3)
    same_under_errors(lambda *qkv: ac.scaled_dot_product_attention(*qkv, **options), *arrays)


def test_initial_values_of_16_bits_do():
    same_under_errors(lambda: normal(0, (8, 9), stddev=1e-5, dtype="float16", xp=np))
