"""A loop of decoding, against the same loop in a library's own functions: ``python -m timed_steps decode-loop``.

A step appends one position to the cache of each layer, and attends to what is there. The peers write into arrays that
are there: PyTorch's by ``index_copy_``, JAX's by ``dynamic_update_slice`` in ``lax.scan``, NumPy's by slices. PyTorch's
and NumPy's attend to keys that are cut to their length. The memory is what a loop takes at most besides its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from attention_core import scaled_dot_product_attention
from attention_core.cache import KeyValueCache, append, cache_mask
from timed_steps import Order, Pair

LAYERS, HEADS, KV_HEADS, CAPACITY, WIDTH, STEPS = 4, 32, 8, 4096, 128, 256
Loop = Callable[[], Any]


def loops(library: str, capacity: int = CAPACITY, steps: int = STEPS) -> dict[str, tuple[Loop, Loop]]:
    """The loops of a library by mode: ours, and that of its own functions. Each returns the outputs of the last step.

    The cache is full after the last step, and has no more than ``capacity - steps`` positions before the first.
    """
    rng = np.random.default_rng(0)
    past = [[rng.standard_normal((1, KV_HEADS, capacity, WIDTH), np.float32) for _ in "kv"] for _ in range(LAYERS)]
    new = [rng.standard_normal((1, heads, 1, WIDTH), np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return {"numpy": _numpy, "torch": _torch, "jax": _jax}[library](past, new, steps)


def _caches(past: Any, length: int, array: Callable[[Any], Any]) -> list[KeyValueCache]:
    """The caches of all layers, filled up to a length."""
    return [KeyValueCache(array(key), array(value), array(np.asarray(length, np.int32))) for key, value in past]


def _eager(past: Any, new: Any, steps: int, array: Callable[[Any], Any]) -> Loop:
    start = past[0][0].shape[-2] - steps
    caches = _caches(past, start, array)
    empty, (query, key, value) = caches[0].length, map(array, new)

    def run() -> Any:
        layers = [cache._replace(length=empty) for cache in caches]
        for _ in range(steps):
            outputs = []
            for index, cache in enumerate(layers):
                layers[index] = cache = append(cache, key, value, donate=True)
                outputs.append(scaled_dot_product_attention(query, cache.key, cache.value, mask=cache_mask(cache)))
        return outputs

    return run


def _numpy(past: Any, new: Any, steps: int) -> dict[str, tuple[Loop, Loop]]:
    query, key, value = new
    capacity = past[0][0].shape[-2]
    caches = [[array.copy() for array in layer] for layer in past]

    def run() -> Any:
        for end in range(capacity - steps + 1, capacity + 1):
            outputs = []
            for keys, values in caches:
                keys[..., end - 1 : end, :], values[..., end - 1 : end, :] = key, value
                rows = query.reshape(1, KV_HEADS, -1, WIDTH)  # of the heads that share keys
                scores = rows * WIDTH**-0.5 @ keys[..., :end, :].swapaxes(-1, -2)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                outputs.append((weights @ values[..., :end, :] / weights.sum(-1, keepdims=True)).reshape(query.shape))
        return outputs

    return {"eager": (_eager(past, new, steps, np.array), run)}


def _torch(past: Any, new: Any, steps: int) -> dict[str, tuple[Loop, Loop]]:
    import torch  # noqa: PLC0415 (one framework is imported in a process)

    query, key, value = map(torch.from_numpy, new)
    capacity = past[0][0].shape[-2]
    caches = [[torch.tensor(array) for array in layer] for layer in past]

    def run() -> Any:
        for end in range(capacity - steps + 1, capacity + 1):
            at, outputs = torch.tensor([end - 1]), []
            for keys, values in caches:
                keys.index_copy_(-2, at, key)
                values.index_copy_(-2, at, value)
                cut = keys[..., :end, :], values[..., :end, :]
                outputs.append(torch.nn.functional.scaled_dot_product_attention(query, *cut, enable_gqa=True))
        return outputs

    return {"eager": (_eager(past, new, steps, torch.tensor), run)}


def _jax(past: Any, new: Any, steps: int) -> dict[str, tuple[Loop, Loop]]:
    import jax  # noqa: PLC0415

    start = past[0][0].shape[-2] - steps

    def ours(query: Any, key: Any, value: Any) -> Callable[..., Any]:
        def step(cache: KeyValueCache) -> Any:
            cache = append(cache, key, value)
            return cache, scaled_dot_product_attention(query, cache.key, cache.value, mask=cache_mask(cache))

        return step

    def theirs(query: Any, key: Any, value: Any) -> Callable[..., Any]:
        query, key, value = (jax.numpy.swapaxes(x, 1, 2) for x in (query, key, value))  # (B, L, H, D)

        def step(cache: KeyValueCache) -> Any:
            keys, values, length = cache
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(old, row, length, axis=1)
                for old, row in ((keys, key), (values, value))
            )
            filled = jax.numpy.reshape(length + 1, 1)
            output = jax.nn.dot_product_attention(query, keys, values, key_value_seq_lengths=filled)
            return KeyValueCache(keys, values, length + 1), jax.numpy.swapaxes(output, 1, 2)

        return step

    def loop(make_step: Callable[..., Callable[..., Any]], layout: Callable[[Any], Any]) -> Loop:
        def scan(caches: Any, new: Any) -> Any:
            step = make_step(*new)

            def body(caches: Any, _: None) -> Any:
                caches, outputs = zip(*map(step, caches), strict=True)
                return list(caches), outputs

            caches, outputs = jax.lax.scan(body, caches, None, length=steps)
            return caches, [output[-1] for output in outputs]

        compiled = jax.jit(scan, donate_argnums=0)
        state = {"caches": _caches([[layout(array) for array in layer] for layer in past], start, jax.numpy.array)}
        new_arrays = [jax.numpy.asarray(each) for each in new]

        def run() -> Any:
            caches = [cache._replace(length=jax.numpy.asarray(start, jax.numpy.int32)) for cache in state["caches"]]
            state["caches"], outputs = compiled(caches, new_arrays)
            return jax.block_until_ready(outputs)

        return run

    return {"scan": (loop(ours, lambda x: x), loop(theirs, lambda x: x.swapaxes(1, 2)))}


def pairs(order: Order) -> Iterator[Pair]:
    """The loops of a library, once both have given the same."""
    library = order.library
    for mode, (ours, theirs) in loops(library, CAPACITY, STEPS).items() if order.takes(library) else ():
        error = max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in zip(ours(), theirs(), strict=True))
        if not error < 1e-5:
            raise ValueError(f"expected the same outputs from both loops of {library}; got a difference of {error:.2g}")
        yield Pair(f"{library}, {mode}", ours, theirs, STEPS)
