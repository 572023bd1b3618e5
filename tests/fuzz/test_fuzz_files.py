"""Files of layers, trees and language models whose bytes, header or metadata were changed: read whole, or refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_helpers import write_gguf
from hypothesis import strategies as st

from attention_core import layers
from attention_core.layers import named_arrays
from attention_files import safetensors
from attention_models.gguf import load_gguf
from attention_models.layouts import LayoutError

LAYERS = (
    layers.MultiHeadAttention(6, 2, dropout=0.1),
    layers.SaganAttention(8, head_channels=2),
    layers.Embeddings(5, 4, 6, num_segments=2),
)
WORDS = st.text(st.characters(codec="utf-8"), max_size=4) | st.sampled_from(["\n", "\r\n", "\u2028"])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | WORDS
    | st.sampled_from(["F32", "weight", "tuple", "layer"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(WORDS | st.sampled_from(["tuple", "dict", "Linear"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def saved(index: int, path: Path) -> bytes:
    """The bytes of a file of one of `LAYERS`."""
    layer = LAYERS[index]
    safetensors.save_layer(path, layer, layer.init(0, xp=np), layer.init_state(0, xp=np))
    return path.read_bytes()


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    branches = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(found for name, branch in branches for found in places(branch, (*path, name)))]


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The tree with the node at a path replaced, or left out where the value is `...`."""
    if not path:
        return value
    tree, name = copy.copy(tree), path[0]
    if value is ... and len(path) == 1:
        del tree[name]
    else:
        tree[name] = replaced(tree[name], path[1:], value)
    return tree


def with_header(data: bytes, change: Any) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(change(json.loads(data[8 : 8 + size]))).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def within_metadata(header: Any, change: Any) -> Any:
    """A change of what this project writes, as text in the metadata of the format."""
    inner = change(json.loads(header["__metadata__"]["attention-core"]))
    return header | {"__metadata__": {"attention-core": json.dumps(inner)}}


@st.composite
def changes(draw: Any) -> tuple[int, str, Any]:
    """Which file, which part of it is changed, and how: how far into it, and what comes there."""
    kind = draw(st.sampled_from(["bytes", "cut", "grow", "header", "metadata", "metadata", "metadata"]))
    fraction = draw(st.floats(0, 1, exclude_max=True))
    what = draw(st.binary(min_size=1, max_size=9) if kind in ("bytes", "grow") else st.just(...) | JSON)
    return draw(st.integers(0, len(LAYERS) - 1)), kind, (fraction, what)


def changed(data: bytes, kind: str, fraction: float, what: Any) -> bytes:
    if kind == "cut":
        return data[: int(fraction * len(data))]
    if kind in ("bytes", "grow"):
        at = int(fraction * len(data))
        return data[:at] + what + data[at + (len(what) if kind == "bytes" else 0) :]

    def at_place(tree: Any) -> Any:
        paths = places(tree)[1:] or [()]
        return replaced(tree, paths[int(fraction * len(paths))], what)

    return with_header(data, at_place if kind == "header" else lambda header: within_metadata(header, at_place))


def loaded(load: Callable[[Path], Any], path: Path, *errors: type[Exception]) -> Any:
    """What a file holds, or `None` if it is refused, in words of the contract."""
    try:
        return load(path)
    except errors as error:
        refusal = str(error)
    assert re.fullmatch("expected .*", refusal), refusal
    return None


def check(case: tuple[int, str, Any], folder: Path, originals: list[bytes]) -> None:
    index, kind, (fraction, what) = case
    path = folder / "changed.safetensors"
    path.write_bytes(changed(originals[index], kind, fraction, what))
    found = loaded(safetensors.load_layer, path, safetensors.FileError)
    if found is None:
        return
    definition, parameters, state = found
    layers.check_fit(definition, parameters, state)
    for array in (named_arrays(parameters) | named_arrays(state, "state")).values():
        assert isinstance(array, np.ndarray)
        array.tobytes()


@pytest.mark.cases(40)
def test_changed_files(fuzz, tmp_path):
    originals = [saved(index, tmp_path / "original.safetensors") for index in range(len(LAYERS))]
    fuzz(lambda case: check(case, tmp_path, originals), changes())


SPANS = ("whole", "header", "counts")  # where changes begin: everywhere, before the tensors, in the first bytes
WIDE = st.sampled_from([0, 1, 2, 2**31, 2**32 - 1, 2**48, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)


@st.composite
def gguf_changes(draw: Any) -> list[tuple[str, float, str, bytes]]:
    """One change of a file, or several: how, how far into which span of it, and what comes there."""
    numbers = WIDE.flatmap(lambda number: st.sampled_from([number.to_bytes(8, "little"), (number % 256).to_bytes(1)]))
    nested = st.integers(1, 300).map(
        lambda depth: (9).to_bytes(4, "little") + ((9).to_bytes(4, "little") + (1).to_bytes(8, "little")) * depth
    )
    change = st.tuples(
        st.sampled_from(["bytes", "bytes", "bytes", "grow", "cut"]),
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(SPANS),
        st.binary(min_size=1, max_size=9) | numbers | numbers | nested,
    )
    return draw(st.lists(change, min_size=1, max_size=3))


def check_gguf(case: list[tuple[str, float, str, bytes]], path: Path, data: bytes) -> None:
    for kind, fraction, span, what in case:
        size = {"whole": len(data), "header": min(1200, len(data)), "counts": min(32, len(data))}[span]
        data = changed(data[:size], kind, fraction, what) + (b"" if kind == "cut" else data[size:])
    path.write_bytes(data)
    with np.errstate(all="ignore"):
        found = loaded(load_gguf, path, safetensors.FileError, LayoutError)
    if found is not None:
        layers.check_fit(*found[:2])


@pytest.mark.cases(60)
def test_changed_gguf_files(fuzz, tmp_path):
    path = tmp_path / "original.gguf"
    texts = {"tokenizer.ggml.tokens": [*"abcdefg"], "tokenizer.ggml.model": "gpt2", "general.alignment": 32}
    write_gguf(path, more_values=texts)
    original = path.read_bytes()
    fuzz(lambda case: check_gguf(case, tmp_path / "changed.gguf", original), gguf_changes())
