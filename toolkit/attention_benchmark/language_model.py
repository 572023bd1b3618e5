"""Time a language model: prefill and decoding steps of every library, as a table on standard output.

``python -m attention_benchmark.language_model PATH`` takes a GGUF file of architecture llama; ``--prompt-length`` and
``--steps`` say how many tokens a prompt and a text after it have. PyTorch and NumPy run next to transformers with the
same weights, and so does transformers on this attention. JAX and TensorFlow run next to ours compiled on PyTorch, and
reproducible arithmetic, with prepared weights, next to the fast one of its library. Two take turns; the table has the
median of the ratios of a turn, with quartiles.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attention_benchmark.turns import measured
from attention_core.backend import get_backend
from attention_core.functions import prepare_weights, sample_tokens
from attention_core.layers import Decoder, named_arrays
from attention_core.layouts import LAYOUTS
from attention_files.gguf import load_gguf

__all__ = ["ROWS", "Model", "main", "memory", "row"]

PROMPT, STEPS, TURNS = 512, 16, 5


class Model(NamedTuple):
    """A model with its parameters on NumPy, and how much of it is timed."""

    definition: Decoder
    parameters: Any
    prompt_length: int
    steps: int


class Tasks(NamedTuple):
    """Functions that take in the prompt, and that choose tokens after it, one by one."""

    prefill: Callable[[], Any]
    decode: Callable[[], Any]


def _ours(model: Model, library: str, mode: str, arithmetic: str = "fast") -> Tasks:
    backend = get_backend(library)
    xp, definition = backend.namespace, model.definition.with_settings(arithmetic=arithmetic)
    parameters = backend.from_numpy(model.parameters)
    parameters = parameters if arithmetic == "fast" else prepare_weights(parameters)
    prompt, token = map(backend.from_numpy, (_prompt(model), np.asarray([[7]], np.int32)))

    def start(parameters: Any, ids: Any) -> Any:
        cache = definition.empty_cache((1,), model.prompt_length + model.steps, xp=xp)
        last = xp.full((1, 1), model.prompt_length - 1, dtype=xp.int32)
        return definition(parameters, ids, cache=cache, select=last)

    def advance(parameters: Any, ids: Any, cache: Any) -> Any:
        logits, cache = definition(parameters, ids, cache=cache, donate=True)
        return sample_tokens(logits, temperature=0.0, xp=xp), cache

    if mode != "eager":
        start, advance = (backend.compile(each, mode=mode) for each in (start, advance))

    def prefill() -> Any:
        return backend.to_numpy(start(parameters, prompt)[0])[0, -1]

    _, filled = start(parameters, prompt)

    def decode() -> Any:
        ids, cache, found = token, filled, []  # whose positions after the prompt are written over each time
        for _ in range(model.steps):
            ids, cache = advance(parameters, ids, cache)
            found.append(ids)
        return np.concatenate([backend.to_numpy(each).ravel() for each in found])

    return Tasks(prefill, decode)


def _transformers(model: Model, implementation: str) -> Tasks:
    import torch  # noqa: PLC0415 (who times no PyTorch does without)
    import transformers  # noqa: PLC0415

    import attention_torch.transformers  # noqa: PLC0415

    attention_torch.transformers.register()
    config = transformers.AutoConfig.for_model(**LAYOUTS["causal-lm"].arguments(model.definition))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    arrays = LAYOUTS["causal-lm"].write(model.definition, model.parameters)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    theirs = theirs.to_empty(device="cpu")
    theirs.load_state_dict(tensors, strict=False)
    theirs.model.rotary_emb.__init__(config)
    theirs.tie_weights()
    theirs.eval()
    prompt, token = torch.from_numpy(_prompt(model)).long(), torch.tensor([[7]])

    def start() -> Any:
        with torch.no_grad():
            return theirs(prompt, use_cache=True, logits_to_keep=1)

    def prefill() -> Any:
        return start().logits[0, -1].numpy()

    past = start().past_key_values

    def decode() -> Any:
        ids, found = token, []
        for _ in range(model.steps):
            with torch.no_grad():
                ids = theirs(ids, past_key_values=past, use_cache=True).logits.argmax(-1)
            found.append(ids)
        past.crop(-model.steps)
        return torch.cat(found).numpy().ravel()

    return Tasks(prefill, decode)


def _prompt(model: Model) -> Any:
    return (np.arange(model.prompt_length, dtype=np.int32)[None] * 7 + 1) % model.definition.num_tokens


ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    f"{library}, {mode}, {arithmetic}": ((library, mode, arithmetic), other)
    for library, mode, arithmetic, other in (
        ("torch", "eager", "fast", ("transformers", "sdpa")),
        ("torch", "compiled", "fast", ("transformers", "sdpa")),
        ("transformers", "attention_core", "fast", ("transformers", "sdpa")),
        ("jax", "jit", "fast", ("torch", "compiled", "fast")),
        ("tensorflow", "graph", "fast", ("torch", "compiled", "fast")),
        ("numpy", "eager", "fast", ("transformers", "eager")),
        ("numpy", "eager", "reproducible", ("numpy", "eager", "fast")),
        ("torch", "eager", "reproducible", ("torch", "eager", "fast")),
        ("jax", "jit", "reproducible", ("jax", "jit", "fast")),
    )
}
"""What is timed, and next to what, by the first column of the table."""


def row(name: str, model: Model, turns: int = TURNS) -> str:
    """Time one row, after both have given the same logits to 1e-3 of the largest."""

    def tasks(key: tuple[str, ...]) -> Tasks:
        return _transformers(model, key[1]) if key[0] == "transformers" else _ours(model, *key)

    ours, theirs = map(tasks, ROWS[name])
    found, expected = ours.prefill(), theirs.prefill()
    difference = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not difference < 1e-3:
        raise SystemExit(f"expected the same logits from both of {name}; got a difference of {difference:.2g}")
    cells = [name, " ".join(ROWS[name][1])]
    for one, other, count in zip(ours, theirs, (1, model.steps), strict=True):
        time, (low, middle, high) = measured(one, other, turns=turns)
        cells += [f"{time / count:.1f} ms", f"{middle:.2f} ({low:.2f} to {high:.2f})"]
    return f"| {' | '.join(cells)} |"


def memory(model: Model) -> float:
    """How many times the memory of float32 weights the prepared ones take."""
    sizes = [
        sum(array.nbytes for array in named_arrays(tree).values())
        for tree in (prepare_weights(model.parameters), model.parameters)
    ]
    return float(sizes[0] / sizes[1])


def main() -> None:
    """Print the table, or one row of it."""
    parser = argparse.ArgumentParser(prog="python -m attention_benchmark.language_model", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--prompt-length", type=int, default=PROMPT)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--row", choices=ROWS, action="append", help="only these rows; by default all")
    chosen = parser.parse_args()
    if min(chosen.prompt_length, chosen.steps, chosen.turns) < 1:
        parser.error("expected --prompt-length, --steps and --turns of at least 1")
    if chosen.row and len(chosen.row) == 1:
        found = load_gguf(chosen.path)
        model = Model(found.definition, found.parameters, chosen.prompt_length, chosen.steps)
        print(row(chosen.row[0], model, chosen.turns), flush=True)
        if chosen.row[0] == "numpy, eager, reproducible":
            print(f"prepared weights take {memory(model):.2f} times the memory of those in float32", flush=True)
        return
    print(
        "| ours | next to | prefill | ratio, with its quartiles | a step | ratio |\n|---|---|---|---|---|---|",
        flush=True,
    )
    run = functools.partial(subprocess.run, check=True)
    sizes = ["--prompt-length", chosen.prompt_length, "--steps", chosen.steps, "--turns", chosen.turns]
    for name in chosen.row or ROWS:
        run([sys.executable, "-m", __spec__.name, str(chosen.path), *map(str, sizes), "--row", name])


if __name__ == "__main__":
    main()
