"""Real sentences through a pretrained model, in the same bits on every backend.

A directory holds an encoder, whose formulas are here; a GGUF file holds a language model, of `language_model`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attention_conformance.own.identical import Identical
from attention_conformance.own.language_model import LanguageModel, identical_cases
from attention_conformance.own.source import Trees
from attention_conformance.port.sides import read_model
from attention_conformance.problem import NumpyArray
from attention_core import scaled_dot_product_attention
from attention_core.backend import array_namespace
from attention_models import Decoder
from attention_models.tokenizers import read_tokenizer
from attention_numpy.trees import map_arrays

PAIRS = (
    ("A man is eating food.", "A man is eating a piece of bread."),
    ("The girl is carrying a baby.", "A woman is playing violin."),
    ("How can I reset my password?", "What is the procedure to recover account credentials?"),
)


@dataclass(frozen=True, eq=False)
class Model:
    """An encoder with its sentences as tokens, padded to one length; parameters are NumPy arrays in float32."""

    name: str
    definitions: tuple[Any, ...]
    parameters: tuple[Any, ...]
    tokenizer: Any
    token_ids: NumpyArray  # (sentences, L)
    is_token: NumpyArray  # (sentences, L): False where padded
    sha256: str  # of the weights


class ModelError(Exception):
    """A model lacks a file, or has one that is broken or does not fit the others."""


def load_model(path: Path, sentences: Sequence[str] = ()) -> Model | LanguageModel:
    """Load a language model from a GGUF file or a folder of transformers, or an encoder from such a folder.

    An encoder gets the tokens of sentences, by default those of `PAIRS`. Raise ModelError when a file is missing,
    broken, or does not fit the others.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    names = {each.name for each in files if path.is_dir()}
    if "pytorch_model.bin" in names and not any(each.endswith(".safetensors") for each in names):
        raise ModelError(
            f"expected model.safetensors in {path}; got pytorch_model.bin, a pickle, which can run any code: "
            "convert it with safetensors.torch.save_file"
        )
    try:
        changed = tuple((each, each.stat().st_mtime_ns, each.stat().st_size) for each in files)
        definitions, parameters, sha256 = _read(path, changed)
        if isinstance(definitions[0], Decoder):
            return LanguageModel(path.resolve().name, definitions[0], parameters[0], sha256)
        tokenizer = read_tokenizer(path / "tokenizer.json")
    except (OSError, TypeError, ValueError, ModuleNotFoundError) as error:
        raise ModelError(f"expected a model, a folder or a GGUF file; got {path}: {error}") from error
    tokenizer.no_padding()
    tokenizer.enable_truncation(definitions[0].num_positions)
    rows = [tokens_of(tokenizer, definitions, sentence) for sentence in sentences or itertools.chain(*PAIRS)]
    length = max(map(len, rows))
    token_ids = np.array([row + [0] * (length - len(row)) for row in rows], dtype=np.int32)
    is_token = np.arange(length) < np.array([[len(row)] for row in rows])
    widened = map_arrays(lambda array: np.ascontiguousarray(array, np.float32), parameters)
    return Model(path.resolve().name, definitions, widened, tokenizer, token_ids, is_token, sha256)


@functools.lru_cache(maxsize=1)
def _read(path: Path, changed: tuple[tuple[Path, int, int], ...]) -> tuple[Any, Any, str]:
    """Definitions and parameters, and the SHA-256 of all weights, one file after the other."""
    digest = hashlib.sha256()
    for file, *_ in changed:
        if file == path or file.suffix == ".safetensors":
            digest.update(file.read_bytes())
    return *read_model(path), digest.hexdigest()


def model_cases(path: Path, *, long: bool = False) -> tuple[Identical, ...]:
    """The cases of a model of which every way of running must give the same bits."""
    model = load_model(path)
    return identical_cases(model, long) if isinstance(model, LanguageModel) else (identical_case(model),)


def tokens_of(tokenizer: Any, definitions: Sequence[Any], sentence: str) -> list[int]:
    """The tokens of a sentence, with those that mark its beginning and end.

    Raise ModelError when the tokenizer knows tokens that the encoder does not.
    """
    ids: list[int] = tokenizer.encode(sentence).ids
    if max(ids, default=0) >= (count := definitions[0].num_tokens):
        raise ModelError(f"expected token ids below vocab_size {count}; got {max(ids)}")
    return ids


def token_vectors(definitions: Sequence[Any], parameters: Sequence[Any], token_ids: Any, is_token: Any) -> Any:
    """One vector for every token: (..., L), (..., L) -> (..., L, C)."""
    x = definitions[0](parameters[0], token_ids)
    for layer, tree in zip(definitions[1:], parameters[1:], strict=True):
        x = layer(tree, x, key_mask=is_token)
    return x


class Encoded(NamedTuple):
    """The vectors of tokens, 0 where padded, (sentences, L, C), and their means, (sentences, 1, C)."""

    tokens: Any
    sentences: Any


def identical_case(model: Model) -> Identical:
    """The encoder and its sentences as a case of which every way of running must give the same bits."""
    trees = {"parameters": model.parameters, "token_ids": model.token_ids, "is_token": model.is_token}
    definitions = [each.with_settings(arithmetic="reproducible") for each in model.definitions]
    encode = functools.partial(_encode, definitions)
    batched = ("token_ids", "is_token")
    return Identical("model", f"tokens and sentences by {model.name}", lambda _: dict(trees), encode, batched=batched)


def _encode(definitions: Sequence[Any], trees: Trees) -> Encoded:
    """The mean of a sentence is what a query of 0 attends: sums are then those of reproducible arithmetic."""
    is_token = trees["is_token"]
    xp = array_namespace(is_token)
    x = token_vectors(definitions, trees["parameters"], trees["token_ids"], is_token)
    nothing = xp.zeros_like(x[:, :, :1])
    mask = xp.expand_dims(is_token, axis=-2)
    means = scaled_dot_product_attention(nothing[:, :1, :], nothing, x, mask=mask, arithmetic="reproducible")
    return Encoded(xp.where(xp.expand_dims(is_token, axis=-1), x, 0.0), means)
