"""Encoders of BERT's type from a directory as published: ``config.json``, ``model.safetensors``, ``tokenizer.json``.

Weights are read from safetensors only: a pickle can run any code.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attention_core.layouts import LAYOUTS
from attention_core.parameters import Embeddings, EncoderLayer
from attention_files.safetensors import FileError, load_arrays
from attention_numpy.trees import is_floating, map_arrays

__all__ = ["Bert", "Config", "ModelError", "load_bert"]

SIZES = (
    "vocab_size",
    "type_vocab_size",
    "max_position_embeddings",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
FIXED = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
DEFAULTS = {"position_embedding_type": "absolute", "is_decoder": False, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
IGNORED = ("embeddings.position_ids", "pooler.", "cls.")
"""Tensors that an encoder does not need: positions, which are 0, 1, 2, …, and heads of other tasks."""


class ModelError(Exception):
    """A model directory lacks a file, or holds one that is broken or does not fit the others."""


@dataclass(frozen=True)
class Config:
    """The sizes of an encoder."""

    vocab_size: int
    type_vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    layer_norm_eps: float


@dataclass(frozen=True)
class Bert:
    """An encoder: parameters as NumPy arrays in float32, and the tokenizer."""

    config: Config
    embeddings: Embeddings
    layers: list[EncoderLayer]
    tokenizer: Any

    def token_ids(self, sentence: str) -> list[int]:
        """The tokens of a sentence, with those that mark its beginning and end.

        Raises
        ------
        ModelError
            When the tokenizer knows tokens that the encoder does not.
        """
        ids: list[int] = self.tokenizer.encode(sentence).ids
        if max(ids, default=0) >= self.config.vocab_size:
            raise ModelError(f"expected token ids below vocab_size {self.config.vocab_size}; got {max(ids)}")
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
    config = _config(_file(directory, "config.json"))
    if not (directory / "model.safetensors").exists() and (directory / "pytorch_model.bin").exists():
        raise ModelError(
            f"expected model.safetensors in {directory}; got pytorch_model.bin, a pickle, which can run any code: "
            "convert it with safetensors.torch.save_file"
        )
    parameters = _parameters(_file(directory, "model.safetensors"), config)
    return Bert(config, *parameters, _tokenizer(_file(directory, "tokenizer.json"), config))


def _file(directory: Path, name: str) -> Path:
    path = directory / name
    if not path.is_file():
        raise ModelError(f"expected {name} in {directory}; got no such file")
    return path


def _config(path: Path) -> Config:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"expected JSON in {path}; got {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"expected a JSON object in {path}; got {type(config).__name__}")
    config = {**DEFAULTS, **config}
    for name, expected in FIXED.items():
        if config.get(name) != expected:
            raise ModelError(f"expected {name} {expected!r} in {path}; got {config.get(name)!r}")
    for name in SIZES:
        if isinstance(config.get(name), bool) or not isinstance(config.get(name), int) or config[name] < 1:
            raise ModelError(f"expected {name} as a positive integer in {path}; got {config.get(name)!r}")
    epsilon = config["layer_norm_eps"]
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise ModelError(f"expected layer_norm_eps as a small positive number in {path}; got {epsilon!r}")
    if config["hidden_size"] % config["num_attention_heads"]:
        heads = config["num_attention_heads"]
        raise ModelError(
            f"expected hidden_size that {heads} heads share out evenly in {path}; got {config['hidden_size']}"
        )
    return Config(**{name: config[name] for name in SIZES}, layer_norm_eps=float(epsilon))


def _tokenizer(path: Path, config: Config) -> Any:
    try:
        library = importlib.import_module("tokenizers")  # of which nothing else has need
    except ModuleNotFoundError as error:
        raise ModelError("expected tokenizers for a model; got none: pip install tokenizers") from error
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more particular
        raise ModelError(f"expected a tokenizer in {path}; got {error}") from error
    tokenizer.no_padding()
    tokenizer.enable_truncation(config.max_position_embeddings)
    return tokenizer


def _parameters(path: Path, config: Config) -> tuple[Embeddings, list[EncoderLayer]]:
    try:
        tensors, _ = load_arrays(path)
    except FileError as error:
        raise ModelError(str(error)) from error
    needed = {name: tensor for name, tensor in tensors.items() if not name.removeprefix("bert.").startswith(IGNORED)}
    for name, tensor in needed.items():
        if not is_floating(tensor.dtype):
            raise ModelError(f"expected tensor {name} of floating point in {path}; got {tensor.dtype.name}")
    widened = {name: tensor.astype(np.float32) for name, tensor in needed.items()}
    heads, epsilon = config.num_attention_heads, config.layer_norm_eps
    try:
        definitions, trees = LAYOUTS["bert"].read(widened, num_heads=heads, epsilon=epsilon, padding_idx=-1, xp=np)
        found = LAYOUTS["bert"].arguments(definitions)
    except ValueError as error:  # of the layout, or of a definition whose sizes do not go together
        raise ModelError(f"expected the tensors of an encoder in {path}; got others: {error}") from error
    for name in SIZES:
        wanted = getattr(config, name)
        if found[name] != wanted:
            raise ModelError(f"expected tensors of {name} {wanted}, as in config.json, in {path}; got {found[name]}")
    embeddings, *layers = map_arrays(np.ascontiguousarray, trees)
    return embeddings, layers
