"""Attentions of libraries that the survey checks besides the presets of the kit: how each is called."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from attention_conformance.kernel.presets import PRESETS as SHIPPED, Preset, flax
from attention_conformance.launch.subject import Subject
from survey.attentions import keras_heads, of_model, onnx, sdpa, session_of, torch_mha, transformers


def gemma2() -> Subject:
    """The eager attention of Gemma 2, with softcap."""
    function = importlib.import_module("transformers.models.gemma2.modeling_gemma2").eager_attention_forward

    def attention(query: Any, key: Any, value: Any, attention_mask: Any = None, scaling: float | None = None,
                  softcap: float | None = None) -> Any:  # fmt: skip
        return of_model(function, query, key, value, attention_mask, scaling=scaling, softcap=softcap)

    return Subject(attention, backend="torch", layout="BHSD", mask="additive")


def gpt_oss() -> Subject:
    """The eager attention of gpt-oss, with sinks."""
    function = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss").eager_attention_forward

    def attention(query: Any, key: Any, value: Any, attention_mask: Any = None, scaling: float | None = None,
                  sinks: Any = None) -> Any:  # fmt: skip
        sinks = query.new_full(query.shape[1:2], float("-inf")) if sinks is None else sinks
        scaling = query.shape[-1] ** -0.5 if scaling is None and query.shape[-1] else scaling
        return of_model(function, query, key, value, attention_mask, sinks=sinks, scaling=scaling)

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


def pallas_mha() -> Subject:
    """The kernel for a GPU, in the interpreter."""
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention")

    def attention(query: Any, key: Any, value: Any, causal: bool = False, sm_scale: float = 1.0) -> Any:
        return module.mha(query, key, value, None, sm_scale, causal, interpret=True)

    return Subject(attention, backend="jax", layout="BSHD", default_scale="one", same_width=True, grouped=False)


def haiku() -> Subject:
    """The module with identities for projections."""
    module, numpy = importlib.import_module("haiku"), importlib.import_module("jax.numpy")

    def attention(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        batch, rows, heads, width = query.shape
        size = heads * width
        flat = [numpy.reshape(each, (batch, each.shape[1], size)) for each in (query, key, value)]

        def forward(*arrays: Any) -> Any:
            made = module.MultiHeadAttention(
                heads, width, with_bias=False, w_init=module.initializers.Identity(), model_size=size
            )
            return made(*arrays, mask=mask)

        identity = {"w": numpy.eye(size, dtype=query.dtype)}
        names = ("query", "key", "value", "linear")
        parameters = {f"multi_head_attention/{name}": identity for name in names}
        output = module.without_apply_rng(module.transform(forward)).apply(parameters, *flat)
        return numpy.reshape(output, (batch, rows, heads, width))

    return Subject(attention, backend="jax", layout="BSHD", mask="keep", same_width=True, grouped=False)


def tokamax(implementation: str) -> Subject:
    """One implementation of the function."""
    function = importlib.import_module("tokamax").dot_product_attention
    importlib.import_module("absl.flags").FLAGS.mark_as_parsed()  # it would read the words of this program

    def attention(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, scale: float | None = None,
                  is_causal: bool = False, softcap: float | None = None) -> Any:  # fmt: skip
        return function(
            query, key, value, bias=bias, mask=mask, scale=scale, is_causal=is_causal, logits_soft_cap=softcap,
            implementation=implementation,
        )  # fmt: skip

    return Subject(attention, backend="jax", layout="BSHD", mask="keep")


def flash_attention_jax() -> Subject:
    """The two functions, with and without causality."""
    module, numpy = importlib.import_module("flash_attention_jax"), importlib.import_module("jax.numpy")

    def attention(query: Any, key: Any, value: Any, causal: bool = False) -> Any:
        if causal:
            return module.causal_flash_attention(query, key, value)
        return module.flash_attention(query, key, value, numpy.ones((key.shape[0], key.shape[2]), bool))

    return Subject(attention, backend="jax", layout="BHSD", grouped=False)


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
        return session_of(True, node, inputs, ("o", kind, ["B", "Sq", "W"]), ("", 17), ("com.microsoft", 1))

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


PRESETS = SHIPPED | {
    "torch.sdpa-math": Preset("torch", functools.partial(sdpa, "MATH")),
    "torch.mha": Preset("torch", torch_mha),
    "keras.mha": Preset("keras", functools.partial(keras_heads, grouped=False)),
    "transformers.eager": Preset("transformers", functools.partial(transformers, sdpa=False)),
    "transformers.sdpa": Preset("transformers", functools.partial(transformers, sdpa=True)),
    "onnx.reference": Preset("onnx", functools.partial(onnx, runtime=False)),
    "onnxruntime": Preset("onnxruntime", functools.partial(onnx, runtime=True)),
    "torch.sdpa-flash": Preset("torch", functools.partial(sdpa, "FLASH_ATTENTION")),
    "transformers.gemma2": Preset("transformers", gemma2),
    "transformers.gpt-oss": Preset("transformers", gpt_oss),
    "x-transformers": Preset("x-transformers", functools.partial(x_transformers, flash=False)),
    "x-transformers.flash": Preset("x-transformers", functools.partial(x_transformers, flash=True)),
    "diffusers": Preset("diffusers", diffusers),
    "jax.pallas-mha": Preset("jax", pallas_mha),
    "haiku": Preset("dm-haiku", haiku),
    "flax.linen": Preset("flax", functools.partial(flax, "flax.linen")),
    "tokamax": Preset("tokamax", functools.partial(tokamax, implementation="xla")),
    "tokamax.chunked": Preset("tokamax", functools.partial(tokamax, implementation="xla_chunked")),
    "flash-attention-jax": Preset("flash-attention-jax", flash_attention_jax),
    "keras.gqa": Preset("keras", functools.partial(keras_heads, grouped=True)),
    "onnxruntime.mha": Preset("onnxruntime", onnxruntime_mha),
    "mlx": Preset("mlx[cpu]", mlx),
    "tinygrad": Preset("tinygrad", tinygrad),
    "openvino": Preset("openvino", openvino),
}
"""All presets, by the name of their row."""


def target_of(name: str) -> str:
    """A preset as the command takes it."""
    return name if name in SHIPPED else f"survey.presets:{_word(name)}"


def __getattr__(word: str) -> Preset:
    """A preset of the survey, by its name as a word."""
    for name, preset in PRESETS.items():
        if _word(name) == word:
            return preset
    raise AttributeError(word)


def _word(name: str) -> str:
    return name.replace(".", "_").replace("-", "_") + "_preset"
