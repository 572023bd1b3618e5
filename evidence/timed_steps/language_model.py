"""A language model: prefill and decoding steps of every library, ``python -m timed_steps language-model``.

The model is a GGUF file of architecture llama. PyTorch and NumPy run next to transformers with the same weights, and so
does transformers on this attention. JAX and TensorFlow run next to ours compiled on PyTorch, and reproducible
arithmetic, with prepared weights, next to the fast one of its library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from attention_core.backend import get_backend
from attention_models import Decoder, prepare_weights, sample_tokens
from attention_models.gguf import load_gguf
from attention_models.layouts import LAYOUTS
from timed_steps import Order, Pair

PROMPT, STEPS = 512, 16


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

    import attention_models.torch.transformers  # noqa: PLC0415

    attention_models.torch.transformers.register()
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


def pairs_of(name: str, model: Model) -> Iterator[Pair]:
    """Prefill and decoding of one row, once both have given the same logits to 1e-3 of the largest."""

    def tasks(key: tuple[str, ...]) -> Tasks:
        return _transformers(model, key[1]) if key[0] == "transformers" else _ours(model, *key)

    ours, theirs = map(tasks, ROWS[name])
    found, expected = ours.prefill(), theirs.prefill()
    difference = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not difference < 1e-3:
        raise ValueError(f"expected the same logits from both of {name}; got a difference of {difference:.2g}")
    for task, one, other, count in zip(Tasks._fields, ours, theirs, (1, model.steps), strict=True):
        yield Pair(f"{name}: {task}, next to {' '.join(ROWS[name][1])}", one, other, count)


def pairs(order: Order) -> Iterator[Pair]:
    """The pairs of a library; transformers is one of PyTorch."""
    assert order.model is not None
    library, found = order.library, load_gguf(order.model)
    model = Model(found.definition, found.parameters, PROMPT, STEPS)
    for name, (ours, _) in ROWS.items():
        is_of_library = ours[0] == library or (ours[0], library) == ("transformers", "torch")
        if is_of_library and order.takes(name):
            yield from pairs_of(name, model)
