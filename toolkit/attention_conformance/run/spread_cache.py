"""A language model whose cache is shared by ranks: each holds the keys and values of some positions, in all layers."""

from __future__ import annotations

from typing import Any

import numpy as np

import attention_core as ac
from attention_conformance.problem import NumpyArray
from attention_conformance.run.language_model import NEW, LanguageModel
from attention_core.backend import Backend
from attention_core.functions import linear, prepare_weights, rotary_embedding

EXACT: dict[str, Any] = {"arithmetic": "reproducible"}


def logits_over(model: LanguageModel, backend: Backend, device: str, shards: ac.Shards | None) -> NumpyArray:
    """The logits of the tokens after the question, most probable ones: without shards, by the cache of the model."""
    definition = model.definition.with_settings(**EXACT)
    parameters = prepare_weights(backend.from_numpy(model.parameters, device=device))
    ids, found, xp = np.asarray([model.question], np.int32), [], backend.namespace
    length = len(model.question) + NEW - 1
    spread = None if shards is None else _Spread(definition, parameters, shards, length)
    cache = definition.empty_cache((1,), length, dtype=xp.float32, device=parameters.token.device, xp=xp)
    for _ in range(NEW):
        tokens = backend.from_numpy(ids, device=device)
        if spread is None:
            logits, cache = definition(parameters, tokens, cache=cache)
        else:
            logits = definition(parameters, tokens, hook=spread)
            spread.start += ids.shape[-1]
        found.append(np.asarray(backend.to_numpy(logits))[0, -1])
        ids = np.asarray([[np.argmax(found[-1])]], np.int32)
    return np.stack(found)


class _Spread:
    """The hook of a decoder that attends to what all ranks hold of former positions."""

    def __init__(self, definition: Any, parameters: Any, shards: ac.Shards, length: int) -> None:
        self.definition, self.layers = definition, parameters.layers
        self.shards = shards._replace(strategy="merge", length=length)
        self.length, self.start = length, 0
        self.held: dict[str, tuple[Any, Any]] = {}

    def __call__(self, name: str, function: Any, x: Any) -> Any:
        if not name.endswith(".attention"):
            return function(x)
        told, maps = self.definition, self.layers[int(name.split(".")[1])].attention
        xp, groups = ac.backend.array_namespace(x), told.layer.attention.groups
        counts = (told.num_heads, groups, groups)
        query, key, value = (
            ac.split_heads(linear(each, x, **EXACT), count) for each, count in zip(maps[:3], counts, strict=True)
        )
        positions = self.start + xp.arange(x.shape[-2], dtype=xp.int32, device=x.device)
        if told.rotary_base is not None:
            turned: dict[str, Any] = {"base": told.rotary_base, "width": told.rotary_width}
            turned |= {"divisors": told.rotary_divisors, "interleaved": told.interleaved}
            query, key = (rotary_embedding(each, positions, **turned, **EXACT) for each in (query, key))
        self.held[name] = keys, values = self._written(name, (key, value), xp)
        options: dict[str, Any] = {"mask": ac.Causal(offset=self.start), "scale": told.scale, "softcap": told.softcap}
        output = ac.scaled_dot_product_attention(query, keys, values, shards=self.shards, **options, **EXACT)
        return linear(maps.output, ac.merge_heads(output), **EXACT)

    def _written(self, name: str, new: tuple[Any, Any], xp: Any) -> tuple[Any, Any]:
        """What this rank holds, with those of the new rows that are its own."""
        like, count = new[0], new[0].shape[-2]
        blank = xp.zeros((self.length, 1), dtype=like.dtype, device=like.device)
        at = ac.shard_positions(ac.shard(blank, self.shards), self.shards) - self.start
        inside, rows = (at >= 0) & (at < count), xp.clip(at, 0, count - 1)
        held = self.held.get(name) or tuple(xp.zeros_like(x[..., :1, :]) for x in new)
        key, value = (
            xp.where(inside[:, None], xp.take(x, rows, axis=-2), old) for x, old in zip(new, held, strict=True)
        )
        return key, value
