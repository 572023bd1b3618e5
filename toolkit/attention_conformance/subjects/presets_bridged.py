"""How attentions of other libraries are called: they get arrays of NumPy, and give such back."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from attention_conformance.subjects.subject import Subject


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


def keras_attention() -> Subject:
    """The layer without weights, which has one head: heads lie in the batch."""
    keras = importlib.import_module("keras")
    layer = keras.layers.Attention(dtype="float32")

    def attention(query: Any, key: Any, value: Any, use_causal_mask: bool = False) -> Any:
        batch, heads, rows, _ = query.shape
        flat = [keras.ops.reshape(each, (batch * heads, -1, each.shape[-1])) for each in (query, key, value)]
        found = layer([flat[0], flat[2], flat[1]], use_causal_mask=use_causal_mask)
        return keras.ops.reshape(found, (batch, heads, rows, -1))

    return Subject(
        attention, backend=str(keras.config.backend()), layout="BHSD", default_scale="one", grouped=False,
        dtypes=("float32",), keeps_dtype=True, keeps_library=True,
    )  # fmt: skip


def _session(runtime: bool, node: Any, inputs: list[Any], output: Any, *opsets: Any) -> Callable[[dict[str, Any]], Any]:
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
        return _session(runtime, node, inputs, ("o", kind, ["B", "Hq", "Sq", "Dv"]), ("", 23))

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False,
                  scale: float | None = None, softcap: float | None = None) -> Any:  # fmt: skip
        options: dict[str, Any] = {"is_causal": int(is_causal)}
        options |= {name: each for name, each in (("scale", scale), ("softcap", softcap)) if each is not None}
        feed = {"q": query, "k": key, "v": value} | ({} if attn_mask is None else {"m": attn_mask})
        masked = "" if attn_mask is None else str(attn_mask.dtype)
        return session(tuple(options.items()), masked, str(query.dtype))(feed)

    return Subject(attention, backend="numpy", layout="BHSD", mask="keep", full_mask=runtime)


def onnxruntime_mha() -> Subject:
    """The contributed operator, whose arrays are (B, S, H * D)."""
    helper, kinds = (getattr(importlib.import_module("onnx"), name) for name in ("helper", "TensorProto"))
    importlib.import_module("onnxruntime")  # which tells at once where it is not installed

    @functools.cache
    def session(options: tuple[tuple[str, Any], ...], biased: bool, dtype: str) -> Callable[[dict[str, Any]], Any]:
        kind = {"float32": kinds.FLOAT, "float16": kinds.FLOAT16}[dtype]
        inputs = [(name, kind, ["B", f"S{name}", f"W{name}"]) for name in "qkv"]
        inputs += [("bias", kind, ["b", "h", "M", "N"])] * biased
        names = [*"qkv", *(["", "", "bias"] if biased else [])]
        node = helper.make_node("MultiHeadAttention", names, ["o"], domain="com.microsoft", **dict(options))
        return _session(True, node, inputs, ("o", kind, ["B", "Sq", "W"]), ("", 17), ("com.microsoft", 1))

    def attention(query: Any, key: Any, value: Any, attention_bias: Any = None, is_causal: bool = False,
                  scale: float | None = None) -> Any:  # fmt: skip
        batch, rows, heads, _ = query.shape
        options: dict[str, Any] = {"num_heads": heads, "unidirectional": int(is_causal)}
        options |= {} if scale is None else {"scale": scale}
        feed = {
            name: np.ascontiguousarray(each).reshape(batch, each.shape[1], -1)
            for name, each in zip("qkv", (query, key, value), strict=True)
        }
        feed |= {} if attention_bias is None else {"bias": np.ascontiguousarray(attention_bias)}
        found = session(tuple(options.items()), attention_bias is not None, str(query.dtype))(feed)
        return found.reshape(batch, rows, heads, -1)

    return Subject(attention, backend="numpy", layout="BSHD", grouped=False)


ONNX_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64"}


def onnx_model(path: str, provider: str) -> Subject:
    """A model of query, key and value, and perhaps of a mask that hides nothing where a call has none."""
    running = importlib.import_module("onnxruntime")
    if provider not in running.get_available_providers():
        raise ValueError(f"expected a provider out of {', '.join(running.get_available_providers())}; got {provider!r}")
    session = running.InferenceSession(path, providers=[provider])
    inputs = session.get_inputs()
    if len(inputs) not in (3, 4):
        names = ", ".join(each.name for each in inputs)
        raise ValueError(f"expected a model of query, key, value and perhaps a mask; got the inputs {names}")
    masks, dtype = inputs[3:], ONNX_TYPES[inputs[0].type]

    def attention(query: Any, key: Any, value: Any) -> Any:
        feed = {each.name: np.ascontiguousarray(x) for each, x in zip(inputs, (query, key, value), strict=False)}
        return session.run(None, feed)[0]

    def masked(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        if mask is None:
            is_bool = masks[0].type == "tensor(bool)"
            mask = np.full((query.shape[0], 1, query.shape[-2], key.shape[-2]), is_bool, bool if is_bool else dtype)
        feed = [query, key, value, mask]
        return session.run(None, {each.name: np.ascontiguousarray(x) for each, x in zip(inputs, feed, strict=True)})[0]

    if not masks:
        return Subject(attention, backend="numpy", dtypes=(dtype,))
    sense = "keep" if masks[0].type == "tensor(bool)" else "additive"
    return Subject(masked, backend="numpy", dtypes=(dtype,), mask_name="mask", mask=sense)


def mlx() -> Subject:
    """The kernel, with gradients by its own differentiation."""
    library = importlib.import_module("mlx.core")

    def computed(arrays: Any, mask: Any, scale: float | None, sinks: Any = None) -> Any:
        scale = arrays[0].shape[-1] ** -0.5 if scale is None else scale
        return library.fast.scaled_dot_product_attention(*arrays, scale=scale, mask=mask, sinks=sinks)

    def placed(*arrays: Any) -> list[Any]:
        return [None if each is None else library.array(each) for each in arrays]

    def attention(query: Any, key: Any, value: Any, mask: Any = None, is_causal: bool = False,
                  scale: float | None = None, sinks: Any = None) -> Any:  # fmt: skip
        *arrays, mask, sinks = placed(query, key, value, mask, sinks)
        return np.asarray(computed(arrays, "causal" if is_causal else mask, scale, sinks))

    def backward(d_output: Any, query: Any, key: Any, value: Any, mask: Any = None, is_causal: bool = False,
                 scale: float | None = None) -> Any:  # fmt: skip
        *arrays, mask, change = placed(query, key, value, mask, d_output)
        mask = "causal" if is_causal else mask
        _, found = library.vjp(lambda *each: computed(each, mask, scale), arrays, [change])
        return [np.asarray(each) for each in found]

    return Subject(
        attention, backend="numpy", backward=backward, layout="BHSD", causal="bottom-right", mask_with_causal=False,
        dtypes=("float32", "float16"),
    )  # fmt: skip


def tinygrad() -> Subject:
    """The method, with gradients by its own differentiation."""
    tensor = importlib.import_module("tinygrad").Tensor

    def computed(arrays: Any, attn_mask: Any, is_causal: bool, enable_gqa: bool) -> Any:
        query, key, value = arrays
        mask = None if attn_mask is None else tensor(np.ascontiguousarray(attn_mask))
        return query.scaled_dot_product_attention(key, value, mask, is_causal=is_causal, enable_gqa=enable_gqa)

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False,
                  enable_gqa: bool = False) -> Any:  # fmt: skip
        arrays = [tensor(np.ascontiguousarray(each)) for each in (query, key, value)]
        return computed(arrays, attn_mask, is_causal, enable_gqa).numpy()

    def backward(d_output: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False,
                 enable_gqa: bool = False) -> Any:  # fmt: skip
        arrays = [tensor(np.ascontiguousarray(each)) for each in (query, key, value)]
        output = computed(arrays, attn_mask, is_causal, enable_gqa)
        found = output.gradient(*arrays, gradient=tensor(np.ascontiguousarray(d_output)))
        return [each.numpy() for each in found]

    return Subject(
        attention, backend="numpy", backward=backward, layout="BHSD", mask_with_causal=False,
        dtypes=("float32", "float16"),
    )  # fmt: skip


def openvino() -> Subject:
    """The operation, compiled once for each set of options."""
    library, operators = (importlib.import_module(name) for name in ("openvino", "openvino.opset13"))

    @functools.cache
    def compiled(masked: str, is_causal: bool, scale: float | None, dtype: str) -> Any:
        made = [operators.parameter([-1, -1, -1, -1], np.dtype(dtype), name=name) for name in "qkv"]
        if masked:
            made.append(operators.parameter([-1, -1, -1, -1], np.dtype(masked), name="m"))
        constant = None if scale is None else operators.constant(np.asarray(scale, dtype))
        node = operators.scaled_dot_product_attention(
            *made[:3], made[3] if masked else None, constant, causal=is_causal
        )
        hint = {"INFERENCE_PRECISION_HINT": "f32"}
        return library.compile_model(library.Model([node], made), "CPU", hint)

    def attention(query: Any, key: Any, value: Any, attention_mask: Any = None, is_causal: bool = False,
                  scale: float | None = None) -> Any:  # fmt: skip
        masked = "" if attention_mask is None else str(attention_mask.dtype)
        feed = [query, key, value, *([] if attention_mask is None else [attention_mask])]
        model = compiled(masked, is_causal, scale, str(query.dtype))
        return np.array(model([np.ascontiguousarray(each) for each in feed])[0])

    return Subject(
        attention, backend="numpy", layout="BHSD", mask_with_causal=False, grouped=False, dtypes=("float32",)
    )
