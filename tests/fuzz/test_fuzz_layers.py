"""Native layers against their definitions on NumPy: settings and calls that are wrong."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
from fuzz_calls import ARRAYS, OTHERS, WRONG, fits
from hypothesis import strategies as st
from layer_helpers import CASES, FEW, MODULES
from test_fuzz_calls import assert_is_of_the_contract, described, plain

from attention_core import layers
from attention_core.backend import get_backend

NUMPY = get_backend("numpy")
RNG = np.random.default_rng(11)


class Valid(NamedTuple):
    """Settings, inputs and options of a call that is right."""

    settings: dict[str, Any]
    inputs: list[np.ndarray]
    options: dict[str, Any]


MORE = {  # options besides those of the case
    "MultiHeadAttention": {"mask": RNG.random((3, 6)) < 0.7, "key_mask": RNG.random((2, 6)) < 0.7, "bias": RNG.random((3, 6))},
    "EncoderLayer": {"mask": RNG.random((5, 5)) < 0.7},
    "Embeddings": {"position_ids": RNG.integers(0, 7, (5,)).astype("int32")},
}  # fmt: skip


def _narrow(array: Any) -> Any:
    return array.astype(np.float32) if getattr(array, "dtype", None) == np.float64 else array


def _valid(name: str) -> Valid:
    settings, inputs, options = CASES[name]
    kind = getattr(layers, name)
    every = {each: getattr(kind(**settings), each) for each in inspect.signature(kind).parameters}
    options = options | MORE.get(name, {})
    return Valid(every, list(map(_narrow, inputs)), {each: _narrow(option) for each, option in options.items()})


LAYERS = {name: _valid(name) for name in FEW}


def called(name: str, settings: dict[str, Any], inputs: list[Any], options: dict[str, Any], backend: Any) -> Any:
    """A layer of a framework, made and called in evaluation; of NumPy the definition, with its first parameters."""
    if backend.name in ("numpy", "array_api_strict"):
        layer, xp = getattr(layers, name)(**settings), backend.namespace
        state = {"state": layer.init_state(1, xp=xp)} if layer.state != () else {}
        return layer(layer.init(1, xp=xp), *inputs, **options, **state, xp=xp)
    kind = getattr(importlib.import_module(MODULES[backend.name]), name)
    layer = kind.init(1, **settings) if backend.name == "jax" else kind(**settings, seed=1)
    if backend.name == "torch":
        layer.eval()
    return layer(*inputs, **options, **({"training": False} if backend.name == "tensorflow" else {}))


class Change(NamedTuple):
    """A layer, and what takes the place of a setting, an input or an option."""

    layer: str
    part: str
    argument: Any
    wrong: str


def changed(change: Change) -> Valid:
    valid = LAYERS[change.layer]
    part = getattr(valid, change.part)
    new = list(part) if isinstance(part, list) else dict(part)
    new[change.argument] = WRONG[change.wrong](part[change.argument])
    return valid._replace(**{change.part: new})


def outcome(change: Change, backend: Any) -> tuple[str, str]:
    valid = changed(change)

    def put(value: Any) -> Any:
        return backend.from_numpy(value) if isinstance(value, np.ndarray) else value

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings, options = (
                {name: put(each) for name, each in of.items()} for of in (valid.settings, valid.options)
            )
            result = called(change.layer, settings, list(map(put, valid.inputs)), options, backend)
    except Exception as error:
        return type(error).__name__, plain(of_keras(str(error)), backend)
    return "", described(result)


def of_keras(message: str) -> str:
    """The words that Keras put its own around."""
    wrapped = re.search(
        r"^Exception encountered when calling [^\n]*\n\n(?:\x1b\[1m)?(.*?)(?:\x1b\[0m)?\n\n", message, re.DOTALL
    )
    return wrapped[1] if wrapped else message


def is_of_keras(change: Change, words: str) -> bool:
    """Whether Keras itself casts what is wrong, or refuses it in words of its own."""
    return change.wrong in ("as float16", "as float64") or words.startswith("Only input tensors may be passed")


@st.composite
def wrong_layers(draw: Any) -> Change:
    name = draw(st.sampled_from(list(LAYERS)))
    part = draw(st.sampled_from([part for part in Valid._fields if getattr(LAYERS[name], part)]))
    content = getattr(LAYERS[name], part)
    argument = draw(st.sampled_from(list(range(len(content)) if isinstance(content, list) else content)))
    words = set(OTHERS) - {"2**40", "fused"} if part == "settings" else WRONG  # the former takes memory, or depends
    wrongs = [
        wrong
        for wrong in WRONG
        if wrong in words and fits(content[argument], wrong) and not isinstance(WRONG[wrong](content[argument]), tuple)
    ]
    return Change(name, part, argument, draw(st.sampled_from(wrongs)))


def check_wrong(change: Change, backend: Any) -> None:
    kind, words = outcome(change, backend)
    if backend.name == "tensorflow" and is_of_keras(change, words):
        return
    if kind:
        assert_is_of_the_contract(kind, words)
    expected = outcome(change, NUMPY)
    if change.part == "settings" or (change.wrong in ARRAYS and change.wrong != "as a list"):
        assert (kind, words) == expected, f"{backend.name} says {kind} {words!r}, numpy {expected[0]} {expected[1]!r}"
    else:  # a layer says what arrays it takes; JAX also takes those of NumPy
        assert bool(kind) == bool(expected[0]), (
            f"{backend.name} says {kind} {words!r}, numpy {expected[0]} {expected[1]!r}"
        )


@pytest.mark.needs("float16")  # which is one of the wrong types
def test_wrong_layers(fuzz, backend):
    fuzz(lambda change: check_wrong(change, backend), wrong_layers())
