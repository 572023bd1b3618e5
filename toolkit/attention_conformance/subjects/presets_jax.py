"""How attentions of JAX, and of libraries that compute with it, are called; Pallas in its interpreters."""

from __future__ import annotations

import importlib
from typing import Any

from attention_conformance.subjects.subject import Subject


def pallas_mha() -> Subject:
    """The kernel for a GPU, in the interpreter."""
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention")

    def attention(query: Any, key: Any, value: Any, causal: bool = False, sm_scale: float = 1.0) -> Any:
        return module.mha(query, key, value, None, sm_scale, causal, interpret=True)

    return Subject(attention, backend="jax", layout="BSHD", default_scale="one", same_width=True, grouped=False)


def tpu_flash() -> Subject:
    """The kernel for a TPU, in the interpreter."""
    module = importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")
    tpu = importlib.import_module("jax.experimental.pallas.tpu")

    def attention(query: Any, key: Any, value: Any, bias: Any = None, causal: bool = False,
                  sm_scale: float = 1.0) -> Any:  # fmt: skip
        with tpu.force_tpu_interpret_mode():
            return module.flash_attention(query, key, value, ab=bias, causal=causal, sm_scale=sm_scale)

    return Subject(
        attention, backend="jax", layout="BHSD", default_scale="one", same_width=True, full_mask=True, grouped=False
    )


def splash() -> Subject:
    """Its masks are known before it is traced, so that it is asked for causality alone."""
    module = importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention")
    jax = importlib.import_module("jax")

    def attention(query: Any, key: Any, value: Any, causal: bool = False) -> Any:
        shape = (query.shape[-2], key.shape[-2])
        rule = module.CausalMask(shape) if causal else module.FullMask(shape)
        heads = module.MultiHeadMask([rule] * query.shape[1])
        kernel = module.make_splash_mha_single_device(heads, interpret=True)
        return jax.vmap(kernel)(query, key, value)

    return Subject(attention, backend="jax", layout="BHSD", default_scale="one", same_width=True, grouped=False)


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


def flax(module: str) -> Subject:
    """The function of a module without dropout."""
    function = importlib.import_module(module).dot_product_attention

    def attention(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None) -> Any:
        return function(query, key, value, bias=bias, mask=mask)

    return Subject(attention, backend="jax", layout="BSHD", mask="keep")


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


def attnax() -> Subject:
    """The function, which takes what JAX has on a CPU."""
    function = importlib.import_module("attnax.kernels.attention").flash_attention

    def attention(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        return function(query, key, value, mask=mask)

    return Subject(attention, backend="jax", mask="keep")


def flash_attention_jax() -> Subject:
    """The two functions, with and without causality."""
    module, numpy = importlib.import_module("flash_attention_jax"), importlib.import_module("jax.numpy")

    def attention(query: Any, key: Any, value: Any, causal: bool = False) -> Any:
        if causal:
            return module.causal_flash_attention(query, key, value)
        return module.flash_attention(query, key, value, numpy.ones((key.shape[0], key.shape[2]), bool))

    return Subject(attention, backend="jax", layout="BHSD", grouped=False)
