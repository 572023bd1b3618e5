"""Encoders of BERT's type from a directory as published: ``config.json``, ``model.safetensors``, ``tokenizer.json``.

Weights are read from safetensors only: a pickle can run any code.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attention_conformance.models.sides import read_model
from attention_numpy.trees import map_arrays

__all__ = ["Bert", "ModelError", "load_bert"]


class ModelError(Exception):
    """A model directory lacks a file, or holds one that is broken or does not fit the others."""


@dataclass(frozen=True)
class Bert:
    """An encoder: embeddings and layers, their parameters as NumPy arrays in float32, and the tokenizer."""

    definitions: tuple[Any, ...]
    parameters: tuple[Any, ...]
    tokenizer: Any

    def token_ids(self, sentence: str) -> list[int]:
        """The tokens of a sentence, with those that mark its beginning and end.

        Raises
        ------
        ModelError
            When the tokenizer knows tokens that the encoder does not.
        """
        ids: list[int] = self.tokenizer.encode(sentence).ids
        if max(ids, default=0) >= (count := self.definitions[0].num_tokens):
            raise ModelError(f"expected token ids below vocab_size {count}; got {max(ids)}")
        return ids


def load_bert(directory: Path) -> Bert:
    """Load an encoder.

    Raises
    ------
    ModelError
        When a file is missing, broken, or does not fit the others.
    """
    if not directory.is_dir():
        raise ModelError(f"expected a model directory; got {directory}, which is none")
    if not (directory / "model.safetensors").exists() and (directory / "pytorch_model.bin").exists():
        raise ModelError(
            f"expected model.safetensors in {directory}; got pytorch_model.bin, a pickle, which can run any code: "
            "convert it with safetensors.torch.save_file"
        )
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (directory / name).is_file():
            raise ModelError(f"expected {name} in {directory}; got no such file")
    try:
        definitions, parameters = read_model(directory)
    except (TypeError, ValueError) as error:  # of a file, of the config, or of arrays that do not fit it
        raise ModelError(f"expected an encoder in {directory}; got others: {error}") from error
    widened = map_arrays(lambda array: np.ascontiguousarray(array, np.float32), parameters)
    return Bert(definitions, widened, _tokenizer(directory / "tokenizer.json", definitions[0].num_positions))


def _tokenizer(path: Path, most: int) -> Any:
    try:
        library = importlib.import_module("tokenizers")  # of which nothing else has need
    except ModuleNotFoundError as error:
        raise ModelError("expected tokenizers for a model; got none: pip install tokenizers") from error
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more particular
        raise ModelError(f"expected a tokenizer in {path}; got {error}") from error
    tokenizer.no_padding()
    tokenizer.enable_truncation(most)
    return tokenizer
