"""Attentions of widespread libraries, which the survey and its presets share."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from attention_conformance.launch.subject import Subject


def torch_mha() -> Subject:
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


def of_model(function: Any, query: Any, key: Any, value: Any, mask: Any, *, sinks: Any = None, **options: Any) -> Any:
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
        return of_model(function, query, key, value, attention_mask, scaling=scaling, dropout=0.0)

    return Subject(attention, backend="torch", layout="BHSD", mask="keep" if sdpa else "additive")


def keras_heads(grouped: bool) -> Subject:
    """The layer of heads, or of grouped heads, with identities for projections."""
    keras = importlib.import_module("keras")
    library = str(keras.config.backend())
    untraced = importlib.import_module("contextlib").nullcontext
    if library == "jax":
        untraced = importlib.import_module("jax").ensure_compile_time_eval

    @functools.cache
    def layer(heads: int, groups: int, width: int, dtype: str) -> Any:
        options = {"use_bias": False, "dtype": dtype}
        made = keras.layers.MultiHeadAttention(heads, width, **options)
        if grouped:
            made = keras.layers.GroupQueryAttention(width, heads, groups, **options)
        shapes = (None, None, heads * width), (None, None, groups * width)
        made.build(shapes[0], shapes[1], shapes[1])
        kernels = [np.eye(size * width).reshape(size * width, size, width) for size in (heads, groups, groups)]
        kernels.append(np.eye(heads * width).reshape(heads, width, heads * width))
        made.set_weights([np.asarray(each, np.float32) for each in kernels])
        return made

    def attention(query: Any, key: Any, value: Any, attention_mask: Any = None, use_causal_mask: bool = False) -> Any:
        batch, rows, heads, width = query.shape
        dtype = keras.backend.standardize_dtype(query.dtype)
        flat = [keras.ops.reshape(each, (batch, -1, each.shape[2] * width)) for each in (query, key, value)]
        with untraced():  # the weights outlive the program that first asks for them
            of_this_size = layer(heads, key.shape[2], width, dtype)
        found = of_this_size(flat[0], flat[2], flat[1], attention_mask=attention_mask, use_causal_mask=use_causal_mask)
        return keras.ops.reshape(found, (batch, rows, heads, width))

    return Subject(
        attention, backend=library, layout="BSHD", mask="keep", same_width=True, grouped=None if grouped else False
    )


def session_of(
    runtime: bool, node: Any, inputs: list[Any], output: Any, *opsets: Any
) -> Callable[[dict[str, Any]], Any]:
    """A model of one operator, by ONNX Runtime or by the reference of ONNX."""
    onnx = importlib.import_module("onnx")
    infos = [onnx.helper.make_tensor_value_info(*each) for each in (*inputs, output)]
    graph = onnx.helper.make_graph([node], "attention", infos[:-1], infos[-1:])
    versions = [onnx.helper.make_opsetid(*each) for each in opsets]
    model = onnx.helper.make_model(graph, opset_imports=versions, ir_version=10)
    if not runtime:
        evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator(model)
        return lambda feed: evaluator.run(None, feed)[0]
    running = importlib.import_module("onnxruntime")
    settings = running.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = 1, 4
    made = running.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return lambda feed: made.run(None, feed)[0]


def onnx(runtime: bool) -> Subject:
    """The operator of the standard."""
    helper, kinds = (getattr(importlib.import_module("onnx"), name) for name in ("helper", "TensorProto"))
    if runtime:
        importlib.import_module("onnxruntime")  # which tells at once where it is not installed

    @functools.cache
    def session(options: tuple[tuple[str, Any], ...], masked: str, dtype: str) -> Callable[[dict[str, Any]], Any]:
        kind = {"float32": kinds.FLOAT, "float16": kinds.FLOAT16, "float64": kinds.DOUBLE}[dtype]
        inputs = [(name, kind, ["B", f"H{name}", f"S{name}", f"D{name}"]) for name in "qkv"]
        inputs += [("m", kinds.BOOL if masked == "bool" else kind, ["b", "h", "M", "N"])] * bool(masked)
        node = helper.make_node("Attention", [each[0] for each in inputs], ["o"], **dict(options))
        return session_of(runtime, node, inputs, ("o", kind, ["B", "Hq", "Sq", "Dv"]), ("", 23))

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False,
                  scale: float | None = None, softcap: float | None = None) -> Any:  # fmt: skip
        options: dict[str, Any] = {"is_causal": int(is_causal)}
        options |= {name: each for name, each in (("scale", scale), ("softcap", softcap)) if each is not None}
        feed = {"q": query, "k": key, "v": value} | ({} if attn_mask is None else {"m": attn_mask})
        masked = "" if attn_mask is None else str(attn_mask.dtype)
        return session(tuple(options.items()), masked, str(query.dtype))(feed)

    return Subject(attention, backend="numpy", layout="BHSD", mask="keep", full_mask=runtime)
