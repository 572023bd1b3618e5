"""Attentions that take a mask of keys, lengths, or packed sequences, as ones that take a mask or a batch."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from attention_conformance.kernel.signature import KEYWORDS, parameters_of
from attention_conformance.launch.subject import Subject

PADDING = ("key_padding_mask", "padding_mask", "key_mask", "kv_mask", "src_key_padding_mask")
LENGTHS = ("seqlens_k", "seq_lens_k", "seqused_k", "cache_seqlens", "kv_lengths", "key_lengths", "kv_seq_lens",
           "key_value_seq_lengths")  # fmt: skip
PACKED = re.compile(r"cu_seq(_?lens?)?(_(q|k|kv))?|max_(seq_?lens?_)?(q|k|kv)|max_seq_?lens?")
"""Parameters by their usual names; the last are of sequences that lie one behind the other."""


def masked_by_keys(attention: Callable[..., Any], name: str, *, counts: bool = False) -> Callable[..., Any]:
    """An attention whose keyword takes a mask (B, N), or counts (B,) of first keys, as one of masks (B, 1, 1, N)."""

    def called(query: Any, key: Any, value: Any, *more: Any, mask: Any = None, **options: Any) -> Any:
        if mask is not None:
            of_keys = tuple(mask.shape[:3]) == (query.shape[0], 1, 1)
            if not of_keys or (counts and bool((mask[..., 1:] & ~mask[..., :-1]).any())):
                wanted = "a mask of the first keys" if counts else "a mask (B, 1, 1, N)"
                got = "another" if of_keys else tuple(mask.shape)
                raise NotImplementedError(f"expected {wanted}, for {name}; got {got}")
            options[name] = mask[:, 0, 0]
            if counts:
                count = options[name].sum(-1)
                options[name] = count.int() if hasattr(count, "int") else count.astype("int32")
        return attention(query, key, value, *more, **options)

    if counts:
        called.reads_masks = True  # type: ignore[attr-defined]
    return called


masked_by_lengths = functools.partial(masked_by_keys, counts=True)


def unpacked(attention: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """An attention of sequences one behind the other, (T, H, D), as one of a batch (B, S, H, D)."""

    def called(query: Any, key: Any, value: Any, **options: Any) -> Any:
        if query.shape[1] != key.shape[1] and not any(name.endswith("q") for name in names):
            raise NotImplementedError(f"expected as many queries as keys, for {names[0]}; got others")
        for name in names:
            batch, length = (query if name.endswith("q") else key).shape[:2]
            options[name] = length
            if name.startswith("cu"):
                places = np.arange(batch + 1, dtype=np.int32) * length
                torch = importlib.import_module("torch") if hasattr(query, "device") and hasattr(query, "dim") else None
                options[name] = torch.from_numpy(places).to(query.device) if torch else places
        result = attention(*(each.reshape(-1, *each.shape[2:]) for each in (query, key, value)), **options)
        output = result[0] if isinstance(result, tuple | list) else result
        return output.reshape(*query.shape[:2], *output.shape[1:])

    return called


def adapted(kernel: Subject) -> Subject:
    """A kernel whose callable takes what the kit asks for; as it is where it does, or says itself what it takes."""
    parameters, _ = parameters_of(kernel.function)
    declared = [*kernel.declared.values(), *(kernel.options or ())]
    free = [name for name in parameters if name not in declared]
    takes_masks = any(name in parameters for name in (*KEYWORDS["mask_name"], *KEYWORDS["bias_name"]))
    packed = [name for name in free if PACKED.fullmatch(name)]
    if kernel.backward is not None or hasattr(kernel.function, "adapter") or kernel.mask_name:
        return kernel
    if any(name.startswith("cu") for name in packed):
        return _wrapped(kernel, parameters, unpacked, *packed)
    for adapter, names in ((masked_by_keys, PADDING), (masked_by_lengths, LENGTHS)):
        for name in names if not takes_masks else ():
            if name in free and parameters[name].default is not inspect.Parameter.empty:
                return _wrapped(kernel, parameters, adapter, name)
    return kernel


def _wrapped(
    kernel: Subject, parameters: Mapping[str, inspect.Parameter], adapter: Callable[..., Any], *names: str
) -> Subject:
    """The kernel by an adapter, with the signature that this gives it."""
    function: Any = functools.wraps(kernel.function, updated=())(adapter(kernel.function, *names))
    rest = [each for name, each in parameters.items() if name not in names]
    if adapter is not unpacked:
        rest.append(inspect.Parameter("mask", inspect.Parameter.KEYWORD_ONLY, default=None))
    function.adapter, function.__signature__ = adapter, inspect.Signature(sorted(rest, key=lambda each: each.kind))
    return replace(kernel, function=function)
