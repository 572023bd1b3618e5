"""Layouts of other libraries: arrays there and back bit for bit, and wrong arrays and settings in the same words."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
from fuzz_calls import WRONG, fits
from hypothesis import strategies as st
from test_fuzz_bits import assert_same_bits
from test_fuzz_calls import assert_is_of_the_contract

from attention_core import layers
from attention_core.backend import get_backend
from attention_core.layers import named_arrays
from attention_core.layouts import LAYOUTS, LayoutError

NUMPY = get_backend("numpy")

ATTENTION = [
    layers.MultiHeadAttention(6, 2),
    layers.MultiHeadAttention(6, 3, bias=False, dropout=0.25),
    layers.MultiHeadAttention(6, 2, key_channels=5, value_channels=4),
    layers.MultiHeadAttention(8, 4, num_key_value_heads=2),
    layers.MultiHeadAttention(6, 2, head_dim=5, value_head_dim=2, output_channels=3),
    layers.MultiHeadAttention(6, 2, extra_key_value=True, zero_attention=True),
    layers.MultiHeadAttention(6, 1, query_bias=False, softcap=2.0),
]
ENCODERS = [
    layers.EncoderLayer(6, 2, 5),
    layers.EncoderLayer(6, 3, 4, norm_first=False, epsilon=1e-12),
    layers.EncoderLayer(4, 1, 3, bias=False),
]
EMBEDDINGS = [
    layers.Embeddings(7, 5, 6, num_segments=2),
    layers.Embeddings(7, 5, 6, norm=False),
    layers.Embeddings(5, 4, 3),
]
DEFINITIONS = {
    **dict.fromkeys(("torch", "keras", "keras-grouped", "flax", "equinox"), ATTENTION),
    **dict.fromkeys(("torch-encoder-layer", "bert-layer"), ENCODERS),
    "bert-embeddings": EMBEDDINGS,
}
SETTINGS = {
    "torch": ("num_heads", "zero_attention", "dropout"),
    "keras": ("num_heads", "dropout"),
    "keras-grouped": ("num_heads", "head_order", "dropout"),
    "flax": ("num_heads", "head_order", "dropout"),
    "equinox": ("num_heads", "dropout"),
    "torch-encoder-layer": ("num_heads", "norm_first", "epsilon", "activation"),
    "bert-layer": ("num_heads", "epsilon", "dropout"),
    "bert-embeddings": ("epsilon", "dropout"),
}


class Conversion(NamedTuple):
    """A layout, a definition by its number, the name of an array or setting, and what takes its place."""

    layout: str
    number: int
    name: int | str
    wrong: str


@st.composite
def conversions(draw: Any) -> Conversion:
    layout = draw(st.sampled_from(list(DEFINITIONS)))
    number = draw(st.integers(0, len(DEFINITIONS[layout]) - 1))
    name = draw(st.none() | st.integers(0, 20) | st.sampled_from(SETTINGS[layout]))
    return Conversion(
        layout, number, "" if name is None else name, draw(st.sampled_from([*WRONG, "left out", "renamed"]))
    )


def convert(case: Conversion, backend: Any) -> tuple[str, str]:
    """Write, change, and read; the error, or an empty word where there was none."""
    layout, definition = LAYOUTS[case.layout], DEFINITIONS[case.layout][case.number]
    parameters = definition.init(3, xp=NUMPY.namespace)
    try:
        written = layout.write(definition, backend.from_numpy(parameters))
        arrays = {name: backend.to_numpy(array) for name, array in written.items()}
        settings = {name: _setting(definition, name) for name in SETTINGS[case.layout]}
        arrays, settings, is_right = _changed(case, arrays, settings)
        put = {
            name: backend.from_numpy(array) if isinstance(array, np.ndarray) else array
            for name, array in arrays.items()
        }
        found, read = layout.read(put, **settings)
    except Exception as error:
        return type(error).__name__, re.sub(r"\b(ndarray|Tensor|ArrayImpl|EagerTensor|Array)\b", "…", str(error))
    if is_right:
        assert found == definition
        assert_same_bits(list(named_arrays(backend.to_numpy(read)).values()), list(named_arrays(parameters).values()))
    return "", repr(found)


def _setting(definition: Any, name: str) -> Any:
    grouped = getattr(definition, "num_key_value_heads", None) is not None
    return ("repeat" if grouped else None) if name == "head_order" else getattr(definition, name)


def _changed(
    case: Conversion, arrays: dict[str, Any], settings: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], bool]:
    if isinstance(case.name, str) and case.name:
        wrong = WRONG.get(case.wrong, WRONG["None"])
        value = settings[case.name]
        return (
            arrays,
            settings | {case.name: wrong(value) if fits(value, case.wrong) else value},
            not fits(value, case.wrong),
        )
    if case.name == "" or not arrays:
        return arrays, settings, True
    name = sorted(arrays)[case.name % len(arrays)]
    array = arrays.pop(name)
    if case.wrong == "renamed":
        arrays[name + "x"] = array
    elif case.wrong != "left out":
        arrays[name] = WRONG[case.wrong](array) if fits(array, case.wrong) else array
    return arrays, settings, not (case.wrong in ("left out", "renamed") or fits(array, case.wrong))


def check(case: Conversion, backend: Any) -> str:
    kind, words = convert(case, backend)
    if kind:
        assert_is_of_the_contract(kind, words, LayoutError.__name__)
    expected = convert(case, NUMPY)
    assert (kind, words) == expected, f"{backend.name} says {kind} {words!r}, numpy {expected[0]} {expected[1]!r}"
    return "refused" if kind else "right"


@pytest.mark.needs("float16")  # which is one of the wrong types
@pytest.mark.cases(30)
def test_converters(fuzz, backend):
    fuzz(lambda case: check(case, backend), conversions())
