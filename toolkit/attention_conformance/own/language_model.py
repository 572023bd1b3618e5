"""Logits of a pretrained language model, in the same bits on every backend."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from attention_conformance.own.identical import Identical
from attention_conformance.own.source import Trees
from attention_conformance.problem import NumpyArray
from attention_core.backend import Backend, array_namespace, on_device_of
from attention_models import Decoder, prepare_weights, sample_tokens
from attention_models.parameters import Decoder as Parameters

KNOWN = {
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53": (  # SmolLM2-135M-Instruct.Q4_1.gguf
        (504, 3575, 282, 4649, 314),
        (12615,),
        (6403, 1980, 253, 655),
        (34, 1232, 216, 34, 446),
        (2068, 325, 28, 355, 441, 288, 325, 28, 338),
        (66, 4243, 359, 2382),
        (1604, 803, 24, 81, 28, 278, 727),
        (53, 446, 29311),
    )
}
"""Prompts of published models, by the SHA-256 of their weights."""

SHORT = 3  # prompts, unless the run is to be long


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A decoder with prompts as tokens."""

    name: str
    definition: Decoder
    parameters: Parameters
    sha256: str  # of its file, or of all files of weights, one after the other

    def prompts(self, long: bool) -> tuple[NumpyArray, NumpyArray]:
        """Prompts of different lengths, padded to one, and their lengths; made up where the model is not known."""
        count = self.definition.num_tokens
        made_up = tuple(tuple((7 * i + j) % count for i in range(length)) for j, length in enumerate((5, 1, 4)))
        rows = KNOWN.get(self.sha256, made_up)[: None if long else SHORT]
        longest = max(map(len, rows))
        padded = [row + (0,) * (longest - len(row)) for row in rows]
        return np.asarray(padded, np.int32), np.asarray([len(row) for row in rows], np.int32)


def identical_cases(model: LanguageModel, long: bool) -> tuple[Identical, ...]:
    """Prompts of different lengths in a batch, at once, or each alone, in pieces: all must give the same bits."""
    ids, lengths = model.prompts(long)
    shows, function, held = f"{len(ids)} prompts by {model.name}", partial(_continue, model), partial(_held, model)
    case = Identical("model", shows, lambda _: {"token_ids": ids, "lengths": lengths}, function, modes=("eager",))
    return (replace(case, batched=("token_ids", "lengths"), held=held, larger=long),)


@functools.lru_cache(maxsize=1)
def _held(model: LanguageModel, backend: Backend, device: str) -> Trees:
    """Weights that are prepared once for all ways of running."""
    return {"parameters": prepare_weights(backend.from_numpy(model.parameters, device=device))}


def _continue(model: LanguageModel, trees: Trees) -> Any:
    """Logits after the prompts, and after the most probable token that follows: (B, 2, V).

    A prompt alone is taken in token by token, or in chunks of two where its length is even.
    """
    ids, lengths = trees["token_ids"], trees["lengths"]
    xp = array_namespace(ids)
    exact = model.definition.with_settings(arithmetic="reproducible")
    batch, length = ids.shape
    cache = exact.empty_cache((batch,), length + 1, ragged=True, dtype=xp.float32, xp=xp, **on_device_of(ids))
    if batch == 1:
        count = int(lengths[0])
        size = 1 if count % 2 else 2
        for start in range(0, count, size):
            first, cache = exact(trees["parameters"], ids[:, start : start + size], cache=cache)
        first = first[:, -1:, :]
    else:
        last = xp.expand_dims(xp.subtract(lengths, 1), axis=-1)
        first, cache = exact(trees["parameters"], ids, cache=cache, num_new=lengths, select=last)
    following = xp.expand_dims(sample_tokens(xp.squeeze(first, axis=-2), temperature=0.0, xp=xp), axis=-1)
    logits, _ = exact(trees["parameters"], following, cache=cache)
    return xp.concat([first, logits], axis=-2)
