"""Real sentences through a pretrained model, on every backend: against NumPy in float64, or in the same bits.

A directory holds an encoder, whose formulas are here; a GGUF file holds a language model, of `language_model`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attention_conformance.cases.case import Case
from attention_conformance.measure.finding import Finding
from attention_conformance.measure.question import Question
from attention_conformance.oracle.ulps import spacing
from attention_conformance.own.identical import Identical
from attention_conformance.own.language_model import (
    LanguageModel,
    ModelError,
    identical_cases,
    is_language_model,
    load_language_model,
    outcome,
)
from attention_conformance.own.source import Trees
from attention_conformance.port.sides import read_model
from attention_conformance.problem import NumpyArray, Problem
from attention_core import scaled_dot_product_attention
from attention_core.backend import Backend, array_namespace, get_backend
from attention_files.writing import FileError
from attention_models.tokenizers import read_tokenizer
from attention_numpy.trees import map_arrays

PAIRS = (
    ("A man is eating food.", "A man is eating a piece of bread."),
    ("The girl is carrying a baby.", "A woman is playing violin."),
    ("How can I reset my password?", "What is the procedure to recover account credentials?"),
)
MODEL_DTYPES = ("float32", "float64")
BOUNDS = {"float32": 4.0, "float64": 4.0}
"""In units in the last place of 1, the length of the vector of a sentence."""


@dataclass(frozen=True)
class Published:
    """What is known of a published model, which is told by the SHA-256 of its weights."""

    hello_world: tuple[int, ...]
    cosines: tuple[float, ...]


PUBLISHED = {
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db": Published(  # all-MiniLM-L6-v2
        (101, 7592, 2088, 102), (0.755337, 0.021744, 0.640819)
    )
}


@dataclass(frozen=True, eq=False)
class Model:
    """An encoder with its sentences as tokens, padded to one length; parameters are NumPy arrays in float32."""

    name: str
    definitions: tuple[Any, ...]
    parameters: tuple[Any, ...]
    tokenizer: Any
    token_ids: NumpyArray  # (sentences, L)
    is_token: NumpyArray  # (sentences, L): False where padded
    published: Published | None
    sha256: str  # of the weights


def load_any(path: Path) -> Model | LanguageModel:
    """Load a language model from a GGUF file or a folder of transformers, or an encoder from such a folder.

    Raise ModelError as `load_model`.
    """
    return load_language_model(path) if is_language_model(path) else load_model(path)


def model_cases(path: Path, *, long: bool = False) -> tuple[Identical, ...]:
    """The cases of a model of which every way of running must give the same bits."""
    if is_language_model(path):
        return identical_cases(load_language_model(path), long)
    return (identical_case(load_model(path)),)


def load_model(directory: Path, sentences: Sequence[str] = ()) -> Model:
    """Load an encoder and turn sentences, by default those of `PAIRS`, into tokens.

    Raise ModelError when a file is missing, broken, or does not fit the others.
    """
    definitions, parameters, tokenizer = _encoder(directory)
    rows = [tokens_of(tokenizer, definitions, sentence) for sentence in sentences or itertools.chain(*PAIRS)]
    length = max(map(len, rows))
    token_ids = np.array([row + [0] * (length - len(row)) for row in rows], dtype=np.int32)
    is_token = np.arange(length) < np.array([[len(row)] for row in rows])
    with (directory / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name, known = directory.resolve().name, PUBLISHED.get(digest)
    return Model(name, definitions, parameters, tokenizer, token_ids, is_token, published=known, sha256=digest)


def tokens_of(tokenizer: Any, definitions: Sequence[Any], sentence: str) -> list[int]:
    """The tokens of a sentence, with those that mark its beginning and end.

    Raise ModelError when the tokenizer knows tokens that the encoder does not.
    """
    ids: list[int] = tokenizer.encode(sentence).ids
    if max(ids, default=0) >= (count := definitions[0].num_tokens):
        raise ModelError(f"expected token ids below vocab_size {count}; got {max(ids)}")
    return ids


def model_case(model: Model | LanguageModel) -> Case:
    """A model as a case: its vectors or its text, next to those of NumPy in float64."""
    shows, answer = "Sentences of a model.", functools.partial(_outcome, model)
    return Case("model", 0, shows, lambda _: Problem({}), dtypes=MODEL_DTYPES, answer=answer)


def _outcome(model: Model | LanguageModel, question: Question) -> Finding:
    """Error, bound and detail, and the cosines of the pairs."""
    way = (question.backend, question.device, question.dtype)
    values: tuple[float, ...] = ()
    if isinstance(model, LanguageModel):
        error, bound, detail = outcome(model, *way, mode=question.mode)
    else:
        vectors = _vectors(model, *way, mode=question.mode).astype(np.float64)
        errors = np.abs(vectors - _reference(model)) / spacing(np.ones(1), question.dtype)
        error, bound = float(np.max(np.where(np.isnan(errors), np.inf, errors))), BOUNDS[question.dtype]
        values = tuple(np.sum(vectors[0::2] * vectors[1::2], axis=-1).tolist())
        detail = f"cosines {', '.join(f'{cosine:.6f}' for cosine in values)}"
        if wrong := _disagreement(model, values):
            error, detail = math.inf, wrong
    verdict = "right" if error <= bound else "silently wrong"
    return replace(question.blank, verdict=verdict, error=error, bound=bound, detail=detail, values=values)


def _disagreement(model: Model, cosines: tuple[float, ...]) -> str:
    """What differs from what is known of a published model; empty where nothing does, or nothing is known."""
    if model.published is None:
        return ""
    ids = tuple(tokens_of(model.tokenizer, model.definitions, "hello world"))
    if ids != model.published.hello_world:
        return f"expected 'hello world' to be {model.published.hello_world}; got {ids}"
    pairs = zip(cosines, model.published.cosines, strict=True)
    deviation = max(abs(found - known) for found, known in pairs)
    return "" if deviation <= 1e-6 else f"expected the published cosines to 1e-6; got {deviation:.2g} off"


def _vectors(model: Model, backend: Backend, device: str, dtype: str, *, mode: str) -> NumpyArray:
    """One vector for every sentence, computed by the core."""
    xp = backend.namespace

    def encode(parameters: Any, token_ids: Any, is_token: Any) -> Any:
        return sentence_vectors(token_vectors(model.definitions, parameters, token_ids, is_token), is_token, xp=xp)

    put = functools.partial(backend.from_numpy, device=device)
    arrays = put(model.parameters, dtype=dtype), put(model.token_ids), put(model.is_token)
    return np.asarray(backend.to_numpy(backend.compile(encode, mode=mode)(*arrays)))


def token_vectors(definitions: Sequence[Any], parameters: Sequence[Any], token_ids: Any, is_token: Any) -> Any:
    """One vector for every token: (..., L), (..., L) -> (..., L, C)."""
    x = definitions[0](parameters[0], token_ids)
    for layer, tree in zip(definitions[1:], parameters[1:], strict=True):
        x = layer(tree, x, key_mask=is_token)
    return x


def sentence_vectors(x: Any, is_token: Any, *, xp: Any) -> Any:
    """The mean over the tokens of each sentence, of length 1:  (..., L, C), (..., L) -> (..., C)."""
    weights = xp.expand_dims(xp.astype(is_token, x.dtype), axis=-1)
    mean = xp.divide(xp.sum(xp.multiply(x, weights), axis=-2), xp.sum(weights, axis=-2))
    return xp.divide(mean, xp.sqrt(xp.sum(xp.square(mean), axis=-1, keepdims=True)))


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


@functools.cache
def _reference(model: Model) -> NumpyArray:
    return _vectors(model, get_backend("numpy"), "cpu", "float64", mode="eager")


def _encoder(directory: Path) -> tuple[Any, Any, Any]:
    """Embeddings and layers, their parameters, and the tokenizer."""
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
    return definitions, widened, _tokenizer(directory / "tokenizer.json", definitions[0].num_positions)


def _tokenizer(path: Path, most: int) -> Any:
    try:
        tokenizer = read_tokenizer(path)
    except (FileError, ModuleNotFoundError) as error:
        raise ModelError(str(error)) from error
    tokenizer.no_padding()
    tokenizer.enable_truncation(most)
    return tokenizer
