"""Wrong arguments: one message for each, whatever the backend, before any computation."""

import math
from fractions import Fraction

import numpy as np
import pytest

import attention_core as ac

B, H, G, M, N, D, E = 2, 6, 3, 4, 5, 7, 8


def arrays(**shapes):
    sizes = {"query": (B, H, M, D), "key": (B, G, N, D), "value": (B, G, N, E)} | shapes
    return [np.ones(size) for size in sizes.values()]


def test_devices_are_not_mixed(backend, put):
    others = backend.devices()[1:]
    if not others:
        pytest.skip(f"{backend.name} has one device here")
    q, k, v = put(arrays())
    with pytest.raises(ValueError):
        ac.scaled_dot_product_attention(q, backend.from_numpy(backend.to_numpy(k), device=others[0]), v)


def test_nothing_is_computed_before_the_arguments_are_checked(put, monkeypatch, xp):
    """A namespace without functions still finds every wrong argument."""

    class Bare:
        __name__ = xp.__name__

    for options in ({"mask": put(np.ones((M, 6), dtype=bool))}, {"softcap": -1.0}, {"dropout": 2}, {"scale": "x"}):
        with pytest.raises((TypeError, ValueError)):
            ac.scaled_dot_product_attention(*put(arrays()), **options, xp=Bare())


def test_what_was_right_once_is_checked_again_with_another_value(put):
    """In the same words each time; and a call that was refused leaves nothing behind."""
    q, k, v = put(arrays())
    for right, wrong in (
        ({"scale": 0.5}, {"scale": math.nan}),
        ({"scale": np.float64(0.5)}, {"scale": np.float64(math.nan)}),
        ({"scale": Fraction(1, 2)}, {"scale": Fraction(10**400)}),
        ({"scale": 0.5}, {"scale": "text"}),
        ({"softcap": 1.0}, {"softcap": -1.0}),
        ({"is_causal": True}, {"is_causal": 1}),
        ({"implementation": "dense"}, {"implementation": "none"}),
        ({"dropout": ac.Dropout(0.5, 1)}, {"dropout": ac.Dropout(0.5, True)}),
        ({"dropout": ac.Dropout(0.5, 1)}, {"dropout": ac.Dropout(0.5, -1)}),
        ({"mask": ac.Causal()}, {"mask": [True]}),
        ({}, {"mask": put(np.ones((3, 3), dtype=bool))}),
    ):
        said = set()
        for _ in range(2):
            ac.scaled_dot_product_attention(q, k, v, **right)
            with pytest.raises((TypeError, ValueError)) as caught:
                ac.scaled_dot_product_attention(q, k, v, **wrong)
            said.add(str(caught.value))
        assert len(said) == 1
    with pytest.raises(ValueError, match="expected value"):
        ac.scaled_dot_product_attention(q, k, v[..., :-1, :])
