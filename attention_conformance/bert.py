"""Encoders of BERT's type from a directory as published: ``config.json``, ``model.safetensors``, ``tokenizer.json``.

Weights are read from safetensors only: a pickle can run any code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from attention_conformance.problem import NumpyArray
from attention_core.parameters import Embeddings, EncoderLayer, FeedForward, LayerNorm, Linear, MultiHeadAttention

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
    tensors = _Tensors(_read(_file(directory, "model.safetensors")))
    tokenizer = _tokenizer(_file(directory, "tokenizer.json"), config)
    embeddings = _embeddings(tensors, config)
    layers = [_layer(tensors, f"encoder.layer.{index}.", config) for index in range(config.num_hidden_layers)]
    tensors.check_all_used()
    return Bert(config, embeddings, layers, tokenizer)


def _file(directory: Path, name: str) -> Path:
    path = directory / name
    if not path.is_file():
        raise ModelError(f"expected {name} in {directory}; got no such file")
    return path


def _config(path: Path) -> Config:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"expected JSON in {path}; got {error}") from error
    if not isinstance(given, dict):
        raise ModelError(f"expected a JSON object in {path}; got {type(given).__name__}")
    given = {**DEFAULTS, **given}
    for name, expected in FIXED.items():
        if given.get(name) != expected:
            raise ModelError(f"expected {name} {expected!r} in {path}; got {given.get(name)!r}")
    for name in SIZES:
        if isinstance(given.get(name), bool) or not isinstance(given.get(name), int) or given[name] < 1:
            raise ModelError(f"expected {name} as a positive integer in {path}; got {given.get(name)!r}")
    epsilon = given["layer_norm_eps"]
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise ModelError(f"expected layer_norm_eps as a small positive number in {path}; got {epsilon!r}")
    if given["hidden_size"] % given["num_attention_heads"]:
        heads = given["num_attention_heads"]
        raise ModelError(
            f"expected hidden_size that {heads} heads share out evenly in {path}; got {given['hidden_size']}"
        )
    return Config(**{name: given[name] for name in SIZES}, layer_norm_eps=float(epsilon))


def _read(path: Path) -> dict[str, NumpyArray]:
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError, TypeError) as error:
        raise ModelError(f"expected tensors in {path}; got {error}") from error


def _tokenizer(path: Path, config: Config) -> Any:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more particular
        raise ModelError(f"expected a tokenizer in {path}; got {error}") from error
    tokenizer.no_padding()
    tokenizer.enable_truncation(config.max_position_embeddings)
    return tokenizer


class _Tensors:
    """Tensors by name, each taken once and checked."""

    def __init__(self, tensors: Mapping[str, NumpyArray]) -> None:
        self._left = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}

    def take(self, name: str, *shape: int) -> NumpyArray:
        tensor = self._left.pop(name, None)
        if tensor is None:
            raise ModelError(f"expected tensor {name} {shape}; got no such tensor")
        if tensor.shape != shape:
            raise ModelError(f"expected tensor {name} {shape}; got {tensor.shape}")
        if tensor.dtype.kind not in "fV" and tensor.dtype.name != "bfloat16":
            raise ModelError(f"expected tensor {name} of floating point; got {tensor.dtype.name}")
        return tensor.astype(np.float32)

    def check_all_used(self) -> None:
        left = sorted(name for name in self._left if not name.startswith(IGNORED))
        if left:
            raise ModelError(f"expected the tensors of an encoder; got also {', '.join(left[:3])} ({len(left)} in all)")


def _embeddings(tensors: _Tensors, config: Config) -> Embeddings:
    channels = config.hidden_size
    return Embeddings(
        token=tensors.take("embeddings.word_embeddings.weight", config.vocab_size, channels),
        position=tensors.take("embeddings.position_embeddings.weight", config.max_position_embeddings, channels),
        segment=tensors.take("embeddings.token_type_embeddings.weight", config.type_vocab_size, channels),
        norm=_norm(tensors, "embeddings.LayerNorm", channels),
    )


def _layer(tensors: _Tensors, prefix: str, config: Config) -> EncoderLayer:
    channels, inner = config.hidden_size, config.intermediate_size

    def linear(name: str, inputs: int, outputs: int) -> Linear:
        weight = tensors.take(f"{prefix}{name}.weight", outputs, inputs)  # published as (out, in)
        return Linear(np.ascontiguousarray(weight.T), tensors.take(f"{prefix}{name}.bias", outputs))

    def square(name: str) -> Linear:
        return linear(name, channels, channels)

    return EncoderLayer(
        attention=MultiHeadAttention(
            query=square("attention.self.query"),
            key=square("attention.self.key"),
            value=square("attention.self.value"),
            output=square("attention.output.dense"),
        ),
        attention_norm=_norm(tensors, f"{prefix}attention.output.LayerNorm", channels),
        feed_forward=FeedForward(
            expand=linear("intermediate.dense", channels, inner), contract=linear("output.dense", inner, channels)
        ),
        feed_forward_norm=_norm(tensors, f"{prefix}output.LayerNorm", channels),
    )


def _norm(tensors: _Tensors, name: str, channels: int) -> LayerNorm:
    return LayerNorm(tensors.take(f"{name}.weight", channels), tensors.take(f"{name}.bias", channels))
