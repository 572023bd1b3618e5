"""Attentions of libraries, by name: how each is called, and what it expects beyond its signature."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attention_conformance.subjects import presets_bridged, presets_jax, presets_torch
from attention_conformance.subjects.subject import Subject


@dataclass(frozen=True)
class Preset:
    """The package that a preset needs, and how its subject is made."""

    package: str
    make: Callable[[], Subject]


def _torch_sdpa() -> Subject:
    functional = importlib.import_module("torch.nn.functional")
    return Subject(functional.scaled_dot_product_attention, backend="torch")


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


def _torch_mha() -> Subject:
    """The functional multi-head attention with identities for projections: one head, as heads are split inside."""
    functional, torch = (importlib.import_module(name) for name in ("torch.nn.functional", "torch"))

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
        batch, heads, rows, width = query.shape
        columns = key.shape[-2]
        identity = torch.eye(width, dtype=query.dtype, device=query.device)
        turned = (each.reshape(batch * heads, -1, width).transpose(0, 1) for each in (query, key, value))
        if attn_mask is not None:
            attn_mask = attn_mask.expand(batch, heads, rows, columns).reshape(batch * heads, rows, columns)
        output, _ = functional.multi_head_attention_forward(
            *turned, embed_dim_to_check=width, num_heads=1, in_proj_weight=None, in_proj_bias=None, bias_k=None,
            bias_v=None, add_zero_attn=False, dropout_p=0.0, out_proj_weight=identity, out_proj_bias=None,
            attn_mask=attn_mask, need_weights=False, use_separate_proj_weight=True, q_proj_weight=identity,
            k_proj_weight=identity, v_proj_weight=identity, training=False,
        )  # fmt: skip
        return output.transpose(0, 1).reshape(batch, heads, rows, width)

    return Subject(attention, backend="torch", layout="BHSD", mask="drop", same_width=True, grouped=False)


def _jax_nn() -> Subject:
    function = importlib.import_module("jax").nn.dot_product_attention
    # Lengths are asked for by masks, and the choice of a kernel by none.
    return Subject(function, backend="jax", layout="BSHD", mask="keep", same_width=True, asks={}, unknown=())


def _keras_ops() -> Subject:
    keras = importlib.import_module("keras")

    def attention(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None,
                  scale: float | None = None, is_causal: bool = False) -> Any:  # fmt: skip
        return keras.ops.dot_product_attention(
            query, key, value, bias=bias, mask=mask, scale=scale, is_causal=is_causal
        )

    return Subject(attention, backend=str(keras.config.backend()), layout="BSHD", mask="keep")


def _equinox() -> Subject:
    function = importlib.import_module("equinox.nn._attention").dot_product_attention
    return Subject(function, backend="jax", layout="SD", mask="keep", full_mask=True, grouped=False)


def _own() -> Subject:
    return Subject(importlib.import_module("attention_core").scaled_dot_product_attention, backend="numpy")


PRESETS = {
    "attention-core": Preset("attention-core", _own),
    "torch.sdpa": Preset("torch", _torch_sdpa),
    "torch.sdpa-math": Preset("torch", functools.partial(presets_torch.sdpa, "MATH")),
    "torch.flex": Preset("torch", _torch_flex),
    "torch.mha": Preset("torch", _torch_mha),
    "jax.nn": Preset("jax", _jax_nn),
    "keras.ops": Preset("keras", _keras_ops),
    "keras.mha": Preset("keras", functools.partial(presets_bridged.keras_heads, grouped=False)),
    "transformers.eager": Preset("transformers", functools.partial(presets_torch.transformers, sdpa=False)),
    "transformers.sdpa": Preset("transformers", functools.partial(presets_torch.transformers, sdpa=True)),
    "onnx.reference": Preset("onnx", functools.partial(presets_bridged.onnx, runtime=False)),
    "onnxruntime": Preset("onnxruntime", functools.partial(presets_bridged.onnx, runtime=True)),
    "flax.nnx": Preset("flax", functools.partial(presets_jax.flax, "flax.nnx")),
    "equinox": Preset("equinox", _equinox),
    "torch.sdpa-flash": Preset("torch", functools.partial(presets_torch.sdpa, "FLASH_ATTENTION")),
    "torch.flash-of-cpu": Preset("torch", presets_torch.flash_of_cpu),
    "torch.causal-lower-right": Preset("torch", presets_torch.causal_lower_right),
    "torch.mha-module": Preset("torch", presets_torch.mha_module),
    "transformers.gemma2": Preset("transformers", presets_torch.gemma2),
    "transformers.gpt-oss": Preset("transformers", presets_torch.gpt_oss),
    "x-transformers": Preset("x-transformers", functools.partial(presets_torch.x_transformers, flash=False)),
    "x-transformers.flash": Preset("x-transformers", functools.partial(presets_torch.x_transformers, flash=True)),
    "diffusers": Preset("diffusers", presets_torch.diffusers),
    "memory-efficient": Preset("memory-efficient-attention-pytorch", presets_torch.memory_efficient),
    "jax.pallas-mha": Preset("jax", presets_jax.pallas_mha),
    "jax.tpu-flash": Preset("jax", presets_jax.tpu_flash),
    "jax.splash": Preset("jax", presets_jax.splash),
    "haiku": Preset("dm-haiku", presets_jax.haiku),
    "flax.linen": Preset("flax", functools.partial(presets_jax.flax, "flax.linen")),
    "tokamax": Preset("tokamax", functools.partial(presets_jax.tokamax, implementation="xla")),
    "tokamax.chunked": Preset("tokamax", functools.partial(presets_jax.tokamax, implementation="xla_chunked")),
    "attnax": Preset("attnax", presets_jax.attnax),
    "flash-attention-jax": Preset("flash-attention-jax", presets_jax.flash_attention_jax),
    "keras.gqa": Preset("keras", functools.partial(presets_bridged.keras_heads, grouped=True)),
    "keras.attention": Preset("keras", presets_bridged.keras_attention),
    "onnxruntime.mha": Preset("onnxruntime", presets_bridged.onnxruntime_mha),
    "mlx": Preset("mlx[cpu]", presets_bridged.mlx),
    "tinygrad": Preset("tinygrad", presets_bridged.tinygrad),
    "openvino": Preset("openvino", presets_bridged.openvino),
}
"""All presets, by the name of the target."""
