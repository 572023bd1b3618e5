"""Native layers against their definitions on NumPy: settings and calls that are wrong."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from fuzz_calls import ARRAYS, OTHERS, WRONG, fits
from hypothesis import strategies as st
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


def _floats(*dims: int) -> np.ndarray:
    return RNG.standard_normal(dims).astype(np.float32)


def _flags(*dims: int) -> np.ndarray:
    return RNG.random(dims) < 0.7


LAYERS: dict[str, Valid] = {
    "DotProductAttention": Valid(
        {"scale": 0.5, "softcap": 2.0, "is_causal": False, "dropout": 0.1, "implementation": "auto", "arithmetic": "fast"},
        [_floats(2, 3, 5), _floats(2, 4, 5), _floats(2, 4, 6)],
        {"mask": _flags(3, 4), "query_mask": _flags(2, 3), "key_mask": _flags(2, 4), "bias": _floats(3, 4)},
    ),
    "MultiHeadAttention": Valid(
        {"channels": 6, "num_heads": 2, "num_key_value_heads": 1, "key_channels": 5, "value_channels": 4, "head_dim": 3, "value_head_dim": 2, "output": True, "output_channels": 7, "bias": True, "query_bias": False, "extra_key_value": True, "zero_attention": False, "scale": 0.5, "softcap": 2.0, "is_causal": True, "dropout": 0.1, "implementation": "auto", "arithmetic": "fast"},
        [_floats(2, 3, 6), _floats(2, 4, 5), _floats(2, 4, 4)],
        {"mask": _flags(2, 3, 4), "query_mask": _flags(2, 3), "key_mask": _flags(2, 4), "bias": _floats(2, 3, 4)},
    ),
    "FeedForward": Valid(
        {"channels": 6, "inner": 5, "output_channels": 4, "bias": True, "dropout": 0.1, "arithmetic": "fast"}, [_floats(2, 3, 6)], {}
    ),
    "EncoderLayer": Valid(
        {"channels": 6, "num_heads": 2, "inner": 5, "norm_first": True, "bias": True, "epsilon": 1e-5, "dropout": 0.1, "implementation": "auto", "arithmetic": "fast"},
        [_floats(2, 3, 6)],
        {"mask": _flags(3, 3), "key_mask": _flags(2, 3)},
    ),
    "Embeddings": Valid(
        {"num_tokens": 7, "num_positions": 5, "channels": 6, "num_segments": 2, "norm": True, "epsilon": 1e-5, "dropout": 0.1, "arithmetic": "fast"},
        [RNG.integers(0, 7, (2, 3)).astype("int32")],
        {"position_ids": RNG.integers(0, 5, (3,)).astype("int32"), "segment_ids": RNG.integers(0, 2, (2, 3)).astype("int32")},
    ),
    "SaganAttention": Valid(
        {"channels": 8, "head_channels": 3, "value_channels": 5, "output": True, "bias": True, "pool": True, "spectral_norm": True, "data_format": "channels_last", "arithmetic": "fast"},
        [_floats(2, 4, 2, 8)],
        {},
    ),
}  # fmt: skip


class Native(NamedTuple):
    """How a framework makes a layer, and calls it in evaluation."""

    make: Callable[[str, dict[str, Any]], Any]
    call: Callable[[Any, list[Any], dict[str, Any]], Any]


def native(backend: Any) -> Native:
    """The layers of a framework; of NumPy the definitions, with their first parameters."""
    if backend.name in ("numpy", "array_api_strict"):
        xp = backend.namespace

        def call(layer: Any, inputs: list[Any], options: dict[str, Any]) -> Any:
            state = {"state": layer.init_state(1, xp=xp)} if layer.state != () else {}
            return layer(layer.init(1, xp=xp), *inputs, **options, **state, xp=xp)

        return Native(lambda name, settings: getattr(layers, name)(**settings), call)
    module = importlib.import_module("attention_keras" if backend.name == "tensorflow" else f"attention_{backend.name}")
    if backend.name == "torch":
        return Native(
            lambda name, settings: getattr(module, name)(**settings, seed=1).eval(),
            lambda layer, inputs, options: layer(*inputs, **options),
        )
    if backend.name == "jax":
        return Native(
            lambda name, settings: getattr(module, name).init(1, **settings),
            lambda layer, inputs, options: layer(*inputs, **options),
        )
    return Native(
        lambda name, settings: getattr(module, name)(**settings, seed=1),
        lambda layer, inputs, options: layer(*inputs, **options, training=False),
    )


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
    valid, framework = changed(change), native(backend)

    def put(value: Any) -> Any:
        return backend.from_numpy(value) if isinstance(value, np.ndarray) else value

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer = framework.make(change.layer, {name: put(value) for name, value in valid.settings.items()})
            options = {name: put(value) for name, value in valid.options.items()}
            result = framework.call(layer, list(map(put, valid.inputs)), options)
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


def check_wrong(change: Change, backend: Any) -> str:
    kind, words = outcome(change, backend)
    if backend.name == "tensorflow" and is_of_keras(change, words):
        return "of Keras"
    if kind:
        assert_is_of_the_contract(kind, words)
    expected = outcome(change, NUMPY)
    if change.part == "settings" or (change.wrong in ARRAYS and change.wrong != "as a list"):
        assert (kind, words) == expected, f"{backend.name} says {kind} {words!r}, numpy {expected[0]} {expected[1]!r}"
    else:  # a layer says what arrays it takes; JAX also takes those of NumPy
        assert bool(kind) == bool(expected[0]), (
            f"{backend.name} says {kind} {words!r}, numpy {expected[0]} {expected[1]!r}"
        )
    return "refused" if kind else "right"


@pytest.mark.needs("float16")  # which is one of the wrong types
def test_wrong_layers(fuzz, backend):
    fuzz(lambda change: check_wrong(change, backend), wrong_layers())
