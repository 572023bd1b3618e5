"""Attentions of libraries, by name: how each is called, and what it expects beyond its signature.

Those of the survey are in ``evidence/survey/presets.py``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attention_conformance.launch.subject import Subject


@dataclass(frozen=True)
class Preset:
    """The package that a preset needs, and how its kernel is made."""

    package: str
    make: Callable[[], Subject]


def member(module: str, name: str, **facts: Any) -> Subject:
    """The function of a module."""
    return Subject(getattr(importlib.import_module(module), name), **facts)


def _torch_flex() -> Subject:
    flex = importlib.import_module("torch.nn.attention.flex_attention")

    def attention(query: Any, key: Any, value: Any, mask: Any = None, bias: Any = None, is_causal: bool = False,
                  scale: float | None = None, enable_gqa: bool = False) -> Any:  # fmt: skip
        torch = importlib.import_module("torch")
        full = (*query.shape[:-1], key.shape[-2])
        masks = None if mask is None else mask.expand(full)
        biases = None if bias is None else bias.expand(full)

        def allowed(batch: Any, head: Any, row: Any, column: Any) -> Any:
            seen = row >= column if is_causal else torch.ones_like(row, dtype=torch.bool)
            return seen if masks is None else seen & masks[batch, head, row, column]

        def biased(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
            return score if biases is None else score + biases[batch, head, row, column]

        block = None
        if mask is not None or is_causal:
            block = flex.create_block_mask(allowed, *full, device=query.device)
        return flex.flex_attention(
            query, key, value, score_mod=biased, block_mask=block, scale=scale, enable_gqa=enable_gqa
        )

    return Subject(attention, backend="torch")


def _keras_ops() -> Subject:
    keras = importlib.import_module("keras")

    def attention(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None,
                  scale: float | None = None, is_causal: bool = False) -> Any:  # fmt: skip
        return keras.ops.dot_product_attention(
            query, key, value, bias=bias, mask=mask, scale=scale, is_causal=is_causal
        )

    return Subject(attention, backend=str(keras.config.backend()), layout="BSHD", mask="keep")


def flax(module: str) -> Subject:
    """The function of a module without dropout."""
    function = importlib.import_module(module).dot_product_attention

    def attention(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None) -> Any:
        return function(query, key, value, bias=bias, mask=mask)

    return Subject(attention, backend="jax", layout="BSHD", mask="keep")


SDPA, DPA = "scaled_dot_product_attention", "dot_product_attention"

PRESETS = {
    "attention-core": Preset("attention-core", functools.partial(member, "attention_core", SDPA, backend="numpy")),
    "torch.sdpa": Preset("torch", functools.partial(member, "torch.nn.functional", SDPA, backend="torch")),
    "torch.flex": Preset("torch", _torch_flex),
    # Lengths are asked for by masks, and the choice of a kernel by none.
    "jax.nn": Preset("jax", functools.partial(member, "jax.nn", DPA, backend="jax", layout="BSHD", mask="keep",
                                              same_width=True, asks={}, unknown=())),
    "keras.ops": Preset("keras", _keras_ops),
    "flax.nnx": Preset("flax", functools.partial(flax, "flax.nnx")),
    "equinox": Preset("equinox", functools.partial(member, "equinox.nn._attention", DPA, backend="jax", layout="SD",
                                                   mask="keep", full_mask=True, grouped=False)),
}  # fmt: skip
"""All presets, by the name of the target."""
