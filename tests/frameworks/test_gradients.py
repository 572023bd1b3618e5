"""Gradients of every public function, against finite differences."""

import math

import numpy as np
import pytest
import tracing_helpers
from blockwise_helpers import quickly
from tracing_helpers import case, leaves, normal

import attention_core as ac
from attention_core.backend import get_backend
from attention_numpy.trees import map_arrays

NUMPY = get_backend("numpy")


def attend(**options):
    """Output, weights and logsumexp under options that hold no arrays of floating point."""
    options |= {"return_weights": True, "return_logsumexp": True}
    return lambda query, key, value: tuple(ac.scaled_dot_product_attention(query, key, value, **options))


# Functions of floating-point arrays; the arrays of integers in between are passed on as they are.
CASES = [name for name in tracing_helpers.CASES if name not in tracing_helpers.OF_INTEGERS]


def is_floating(array):
    return array.dtype.kind == "f"


def measured(backend, function, weights):
    """A function to a number: all results, each element under a weight of its own.  -inf, which is constant, is left out."""
    xp = backend.namespace

    def measure(*arrays):
        total = xp.asarray(0.0, dtype=xp.float64)
        for result, weight in zip(leaves(function(*arrays)), weights, strict=True):
            result = xp.astype(result, xp.float64)
            finite = xp.where(xp.isfinite(result), result, xp.zeros_like(result))
            total = xp.add(total, xp.sum(xp.multiply(finite, backend.from_numpy(weight))))
        return total

    return measure


def cotangents(function, arrays):
    """Random weights for all elements of all results."""
    rng = np.random.default_rng(53)
    return [rng.standard_normal(result.shape) for result in leaves(function(*arrays))]


def gradients(backend, function, arrays, weights):
    """The number, and its gradients for the arrays of floating point, in order, in NumPy."""
    measure = measured(backend, function, weights)
    value, result = quickly(backend, backend.value_and_grad(measure))(*backend.from_numpy(arrays))
    inputs = leaves(arrays)
    results = [leaf for leaf in leaves(backend.to_numpy(result)) if leaf.dtype == np.float64]
    wanted = [array for array in inputs if is_floating(array)]
    assert [leaf.shape for leaf in results] == [array.shape for array in wanted]
    return float(backend.to_numpy(value)), results


def shifted(arrays, direction, distance):
    steps = iter(direction)
    return map_arrays(lambda leaf: leaf + distance * next(steps) if is_floating(leaf) else leaf, tuple(arrays))


def directional_derivative(function, arrays, weights, direction):
    """The derivative along a direction, by central differences of two widths, whose leading errors cancel."""
    measure = measured(NUMPY, function, weights)

    def difference(width):
        return (measure(*shifted(arrays, direction, width)) - measure(*shifted(arrays, direction, -width))) / (
            2 * width
        )

    width = 2.0**-12
    return (4 * difference(width / 2) - difference(width)) / 3


@pytest.mark.needs("gradients")
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_directional_derivatives(backend, name):
    """And the program that gives them has the numbers of NumPy."""
    function, arrays = case(name, "numpy")
    weights = cotangents(function, arrays)
    value, actual = gradients(backend, function, arrays, weights)
    assert value == pytest.approx(float(measured(NUMPY, function, weights)(*arrays)), rel=1e-12, abs=1e-11)
    rng = np.random.default_rng(59)
    for _ in range(3):
        direction = [rng.standard_normal(array.shape) for array in actual]
        along = sum(float(np.sum(gradient * step)) for gradient, step in zip(actual, direction, strict=True))
        size = math.sqrt(sum(float(np.sum(gradient**2)) for gradient in actual))
        assert along == pytest.approx(directional_derivative(function, arrays, weights, direction), abs=1e-8 * size)


@pytest.mark.needs("gradients")
def test_gradients_of_gradients_are_directional_derivatives(backend, rng):
    """With an array as mask, which leaves a query without keys, a bias and a softcap."""
    xp = backend.namespace
    arrays = [normal(2, 3, 2), normal(1, 4, 2), normal(1, 4, 2), normal(2, 3, 4)]
    mask = np.asarray([[True, False, True, True], [False, False, False, False], [True, True, True, False]])
    direction, along = ([rng.standard_normal(array.shape) for array in arrays] for _ in range(2))
    mask, direction = backend.from_numpy((mask, direction))

    def total(query, key, value, bias):
        output, weights, _ = attend(mask=mask, bias=bias, softcap=2.0)(query, key, value)
        return xp.add(xp.sum(xp.square(output)), xp.sum(xp.pow(weights, 3)))

    def directional(*arrays):
        found = backend.value_and_grad(total)(*arrays)[1]
        return sum(xp.sum(xp.multiply(each, step)) for each, step in zip(found, direction, strict=True))

    derivative = quickly(backend, backend.value_and_grad(directional))
    second = backend.to_numpy(derivative(*backend.from_numpy(arrays))[1])
    moved = (
        derivative(*backend.from_numpy(shifted(arrays, along, distance)))[0] for distance in (2.0**-14, -(2.0**-14))
    )
    after, before = backend.to_numpy(tuple(moved))
    expected = sum(float(np.sum(each * step)) for each, step in zip(second, along, strict=True))
    assert (after - before) * 2**13 == pytest.approx(expected, rel=1e-6)
