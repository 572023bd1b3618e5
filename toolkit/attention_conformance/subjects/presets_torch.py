"""How attentions of PyTorch, and of libraries that compute with it, are called."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from attention_conformance.subjects.subject import Subject


def sdpa(kernel: str) -> Subject:
    """The function, with one of its kernels alone."""
    functional, kernels = (importlib.import_module(name) for name in ("torch.nn.functional", "torch.nn.attention"))

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False,
                  scale: float | None = None, enable_gqa: bool = False) -> Any:  # fmt: skip
        with kernels.sdpa_kernel(getattr(kernels.SDPBackend, kernel)):
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )

    return Subject(attention, backend="torch", layout="BHSD")


def flash_of_cpu() -> Subject:
    """The operator below ``scaled_dot_product_attention`` on a CPU, with its logsumexp."""
    kernel = importlib.import_module("torch").ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False,
                  scale: float | None = None) -> Any:  # fmt: skip
        return kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)

    return Subject(attention, backend="torch", layout="BHSD", mask="additive", asks={"logsumexp": {}})


def causal_lower_right() -> Subject:
    """The function, with its mask that counts from the bottom right."""
    functional, biases = (importlib.import_module(name) for name in ("torch.nn.functional", "torch.nn.attention.bias"))

    def attention(query: Any, key: Any, value: Any, is_causal: bool = False, scale: float | None = None,
                  enable_gqa: bool = False) -> Any:  # fmt: skip
        mask = biases.causal_lower_right(query.shape[-2], key.shape[-2]) if is_causal else None
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )

    return Subject(attention, backend="torch", layout="BHSD", causal="bottom-right")


def mha_module() -> Subject:
    """The module in evaluation, whose fast path takes one tensor: heads of query, key and value lie side by side."""
    torch = importlib.import_module("torch")

    @functools.cache
    def module(heads: int, width: int, dtype: Any) -> Any:
        size = heads * width
        made = torch.nn.MultiheadAttention(3 * size, 3 * heads, bias=False, batch_first=True, dtype=dtype).eval()
        eye, made.in_proj_weight.data = torch.eye(size, dtype=dtype), torch.zeros(9 * size, 3 * size, dtype=dtype)
        for part in range(3):
            made.in_proj_weight.data[3 * part * size :][:size, part * size :][:, :size] = eye
        made.out_proj.weight.data = torch.eye(3 * size, dtype=dtype)
        return made.requires_grad_(False)

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
        batch, rows, heads, width = query.shape
        if key.shape[1] != rows:
            raise ValueError("the fast path is for self-attention")
        packed = torch.cat([each.reshape(batch, rows, -1) for each in (query, key, value)], dim=-1)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(batch, heads, rows, rows).repeat(1, 3, 1, 1).reshape(-1, rows, rows)
        made = module(heads, width, query.dtype)
        output, _ = made(packed, packed, packed, attn_mask=attn_mask, need_weights=False)
        return output[..., : heads * width].reshape(batch, rows, heads, width)

    return Subject(attention, backend="torch", layout="BSHD", mask="drop", same_width=True, grouped=False)


def _of_model(function: Any, query: Any, key: Any, value: Any, mask: Any, *, sinks: Any = None, **options: Any) -> Any:
    """What the attention of a model gives, which asks for some fields of its module."""
    layer = importlib.import_module("types").SimpleNamespace(training=False, is_causal=False, sinks=sinks)
    layer.num_key_value_groups, layer.head_dim = query.shape[1] // key.shape[1], query.shape[-1]
    return function(layer, query, key, value, mask, **options)[0].transpose(1, 2)


def transformers(sdpa: bool) -> Subject:
    """The attention of Llama, or that by PyTorch's function."""
    module = "transformers.integrations.sdpa_attention" if sdpa else "transformers.models.llama.modeling_llama"
    function = getattr(importlib.import_module(module), "sdpa_attention_forward" if sdpa else "eager_attention_forward")

    def attention(query: Any, key: Any, value: Any, attention_mask: Any = None, scaling: float | None = None) -> Any:
        scaling = query.shape[-1] ** -0.5 if scaling is None and query.shape[-1] else scaling
        return _of_model(function, query, key, value, attention_mask, scaling=scaling, dropout=0.0)

    return Subject(attention, backend="torch", layout="BHSD", mask="keep" if sdpa else "additive")


def gemma2() -> Subject:
    """The eager attention of Gemma 2, with softcap."""
    function = importlib.import_module("transformers.models.gemma2.modeling_gemma2").eager_attention_forward

    def attention(query: Any, key: Any, value: Any, attention_mask: Any = None, scaling: float | None = None,
                  softcap: float | None = None) -> Any:  # fmt: skip
        return _of_model(function, query, key, value, attention_mask, scaling=scaling, softcap=softcap)

    return Subject(attention, backend="torch", layout="BHSD", mask="additive")


def gpt_oss() -> Subject:
    """The eager attention of gpt-oss, with sinks."""
    function = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss").eager_attention_forward

    def attention(query: Any, key: Any, value: Any, attention_mask: Any = None, scaling: float | None = None,
                  sinks: Any = None) -> Any:  # fmt: skip
        sinks = query.new_full(query.shape[1:2], float("-inf")) if sinks is None else sinks
        scaling = query.shape[-1] ** -0.5 if scaling is None and query.shape[-1] else scaling
        return _of_model(function, query, key, value, attention_mask, sinks=sinks, scaling=scaling)

    return Subject(attention, backend="torch", layout="BHSD", mask="additive")


def x_transformers(flash: bool) -> Subject:
    """The module below its attention layer."""
    made = importlib.import_module("x_transformers.attend").Attend

    def attention(query: Any, key: Any, value: Any, mask: Any = None, attn_bias: Any = None, causal: bool = False,
                  scale: float | None = None) -> Any:  # fmt: skip
        attend = made(causal=causal, scale=scale, flash=flash).eval()
        return attend(query, key, value, mask=mask, attn_bias=attn_bias)[0]

    return Subject(attention, backend="torch", layout="BHSD", mask="keep")


def diffusers() -> Subject:
    """The dispatching function, with the native kernel."""
    function = importlib.import_module("diffusers.models.attention_dispatch").dispatch_attention_fn

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False,
                  scale: float | None = None, enable_gqa: bool = False) -> Any:  # fmt: skip
        return function(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            backend="native",
        )  # fmt: skip

    return Subject(attention, backend="torch", layout="BSHD")


def memory_efficient() -> Subject:
    """The function, whose masks are biases here."""
    module = importlib.import_module("memory_efficient_attention_pytorch.memory_efficient_attention")

    def attention(query: Any, key: Any, value: Any, attn_bias: Any = None, causal: bool = False) -> Any:
        return module.memory_efficient_attention(query, key, value, attn_bias=attn_bias, causal=causal)

    return Subject(attention, backend="torch", layout="BHSD", full_mask=True)
