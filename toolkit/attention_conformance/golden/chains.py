"""A hash for each layer and token of a language model, by which two machines find the first place where they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attention_conformance.port.sides import ComparisonError, read_inputs, read_model
from attention_conformance.problem import NumpyArray
from attention_core.backend import Backend
from attention_core.layers import named_arrays
from attention_files.writing import write_file
from attention_models import Decoder

DIGITS = 16
"""Of a hash, in base 16."""

Chain = dict[str, list[list[str]]]
"""By name of a place, for each sequence and each token, the hash of a vector."""


ABOUT = ("arithmetic", "token_ids", "model")
"""What the hashes of a chain depend on, besides the machine."""


@dataclass(frozen=True)
class Prompt:
    """A language model in an arithmetic, and the tokens that it is given.

    Attributes
    ----------
    definition : Decoder
    parameters : attention_models.parameters.Decoder
    token_ids : numpy.ndarray
    about : mapping
        ``arithmetic``; the SHA-256 of ``token_ids``; and, as ``model``, that of the definition, and of all parameters
        with their names, shapes and dtypes.
    """

    definition: Any
    parameters: Any
    token_ids: NumpyArray
    about: Mapping[str, str]


def read_prompt(model: Path, inputs: Path | None = None, arithmetic: str = "reproducible") -> Prompt:
    """Read a language model and tokens.

    Parameters
    ----------
    model : Path
        A file of this project or of GGUF, or a folder of transformers.
    inputs : Path, optional
        ``token_ids`` (B, L); by default 1, 2, … of 16 tokens.
    arithmetic : {"reproducible", "fast"}

    Returns
    -------
    Prompt

    Raises
    ------
    ComparisonError, FileError, LayoutError
        When the model is no language model, or tokens do not fit.
    """
    (definition, *others), (parameters, *_) = read_model(model)
    if others or not isinstance(definition, Decoder):
        raise ComparisonError(f"expected a language model; got {model}, of {type(definition).__name__}")
    arrays = {} if inputs is None else read_inputs(inputs)
    if inputs is not None and set(arrays) != {"token_ids"}:
        raise ComparisonError(f"expected token_ids alone in {inputs}; got {', '.join(sorted(arrays))}")
    default = np.arange(1, 17, dtype=np.int32)[None] % definition.num_tokens
    token_ids = np.atleast_2d(arrays.get("token_ids", default))
    weights = {str(definition.with_settings(arithmetic="fast")): np.zeros(0), **named_arrays(parameters)}
    about = dict(zip(ABOUT, (arithmetic, _hash({"": token_ids.astype(np.int64)}), _hash(weights)), strict=True))
    return Prompt(definition.with_settings(arithmetic=arithmetic), parameters, token_ids, about)


def chain_of(prompt: Prompt, backend: Backend) -> Chain:
    """Hash what a language model computes for each token: the embeddings, each layer with its parts, and the logits."""
    chain: Chain = {}

    def note(name: str, array: Any) -> Any:
        chain[name] = _hashes(np.asarray(backend.to_numpy(array)))
        return array

    def hook(name: str, function: Callable[[Any], Any], h: Any) -> Any:
        return note(name, function(note("embeddings", h) if name == "layers.0" else h))

    tree, tokens = (backend.from_numpy(each) for each in (prompt.parameters, prompt.token_ids))
    note("logits", prompt.definition(tree, tokens, hook=hook))
    return chain


def _hash(arrays: Mapping[str, Any]) -> str:
    """The hash of some arrays, with their names, shapes and dtypes."""
    sha256 = hashlib.sha256()
    for name, array in arrays.items():
        sha256.update(f"{name} {array.shape} {array.dtype.name}\n".encode() + np.ascontiguousarray(array).tobytes())
    return sha256.hexdigest()


def _hashes(array: NumpyArray) -> list[list[str]]:
    """The hash of each vector of (B, L, C)."""
    rows = np.ascontiguousarray(array)
    return [[hashlib.sha256(row.tobytes()).hexdigest()[:DIGITS] for row in sequence] for sequence in rows]


def first_unlike(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """The first place where two chains part, in words; empty where they do not."""
    if list(first) != list(second):
        return f"other places: {len(first)} and {len(second)} of them"
    for name in first:
        both = first[name], second[name]
        if [len(each) for each in both[0]] != [len(each) for each in both[1]]:
            return f"other numbers of tokens, in {name}"
        for sequence, rows in enumerate(zip(*both, strict=True)):
            for token, pair in enumerate(zip(*rows, strict=True)):
                if pair[0] != pair[1]:
                    return f"{name}, sequence {sequence}, token {token}: {pair[0]} and {pair[1]}"
    return ""


def write_chain(path: Path, chain: Chain, about: Mapping[str, str]) -> None:
    """Write a chain as JSON, with what it is about."""
    write_file(path, (json.dumps({"about": about, "chain": chain}, indent=1) + "\n").encode())


def read_chain(path: Path) -> tuple[Chain, Mapping[str, str]]:
    """Read what `write_chain` wrote. Raise ComparisonError when the file is none of these."""
    try:
        data = json.loads(path.read_bytes())
        chain = {name: [[str(each) for each in row] for row in rows] for name, rows in data["chain"].items()}
        return chain, {name: str(data["about"][name]) for name in ABOUT}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ComparisonError(f"expected a file that --chain wrote; got {path}") from error
