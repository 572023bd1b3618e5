"""Tokenizers of language models: of a folder of transformers, or of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attention_files.optional import optional
from attention_files.safetensors import FileError
from attention_models import Decoder
from attention_models.checkpoints import end_tokens, open_causal_lm
from attention_models.gguf import open_gguf

tokenizers = optional("tokenizers", "text")
PRE_TOKENIZERS = ("smollm",)
ENDS = ("ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id")


def open_text_model(
    path: Path, tokenizer_path: Path | None = None
) -> tuple[Any, Decoder, Callable[[], Any], list[int]]:
    """A tokenizer, which is looked for first, a model, what reads its weights, and the tokens that end a text."""
    if path.is_dir():
        tokenizer = read_tokenizer(tokenizer_path or path / "tokenizer.json")
        definition, read_weights = open_causal_lm(path)
        return tokenizer, definition, read_weights, end_tokens(path)
    if not path.exists():
        raise FileError(f"expected --model, a folder of transformers or a GGUF file; got {path}: no such file")
    definition, read_weights, values = open_gguf(path)
    tokenizer = gguf_tokenizer(path, values) if tokenizer_path is None else read_tokenizer(tokenizer_path)
    ends = [values[name] for name in ENDS if name in values]
    if not all(type(end) is int for end in ends):
        raise FileError(f"expected tokens that end a text in {path} as integers; got {ends}")
    return tokenizer, definition, read_weights, ends


def read_tokenizer(file: Path) -> Any:
    """The tokenizer of a ``tokenizer.json``."""
    if not file.is_file():
        raise FileError(f"expected a tokenizer in {file}; got no such file")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except ModuleNotFoundError:
        raise
    except Exception as error:  # of no class of its own
        raise FileError(f"expected a tokenizer in {file}; got {error}") from error


def gguf_tokenizer(path: Path, values: dict[str, Any]) -> Any:
    """The byte-level tokenizer of a GGUF file."""
    kind, split = values.get("ggml.model"), values.get("ggml.pre")
    if kind != "gpt2" or split not in PRE_TOKENIZERS:
        raise FileError(
            f"expected a tokenizer gpt2 of {', '.join(PRE_TOKENIZERS)} in {path}, or --tokenizer with the model's"
            f" tokenizer.json; got {kind} of {split}"
        )
    for name in ("ggml.tokens", "ggml.merges"):
        if name not in values:
            raise FileError(f"expected tokenizer.{name} in {path}; got no such value")
        if not isinstance(values[name], list) or not all(isinstance(each, str) for each in values[name]):
            raise FileError(f"expected tokenizer.{name} in {path} as a list of texts; got others")
    tokens, byte_pairs = values["ggml.tokens"], tokenizers.models.BPE
    try:
        merges = [tuple(merge.split(" ")) for merge in values["ggml.merges"]]
        model = byte_pairs({token: index for index, token in enumerate(tokens)}, merges)
    except Exception as error:  # of no class of its own
        raise FileError(f"expected a tokenizer in {path}; got {error}") from error
    tokenizer = tokenizers.Tokenizer(model)
    bytes_of = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, bytes_of])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    control, whole = 3, 4  # of the types of tokens: whole ones are never cut
    types = values.get("ggml.token_type", [])
    if not isinstance(types, list):
        raise FileError(f"expected tokenizer.ggml.token_type in {path} as a list; got {types!r}")
    tokenizer.add_special_tokens([token for token, each in zip(tokens, types, strict=False) if each == control])
    tokenizer.add_tokens([token for token, each in zip(tokens, types, strict=False) if each == whole])
    if any(values.get(name, False) for name in ("ggml.add_eos_token", "ggml.add_sep_token")):
        raise FileError(f"expected prompts without a token at their end in {path}; got add_eos_token or add_sep_token")
    if values.get("ggml.add_bos_token", False):
        first = values.get("ggml.bos_token_id")
        if type(first) is not int or first not in range(len(tokens)):
            raise FileError(f"expected tokenizer.ggml.bos_token_id in {path} below {len(tokens)}; got {first}")
        start = (tokens[first], first)
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing([start[0], "$A"], special_tokens=[start])
    return tokenizer
