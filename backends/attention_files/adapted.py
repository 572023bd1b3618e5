"""Files of the layers of adapters, which have a class for all of them: what `save` and `load` of each do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from attention_core import layers
from attention_files.safetensors import load_layer, save_layer

L = TypeVar("L")


def save(path: str | os.PathLike[str], layer: Any, kind: type[Any], hint: str = "") -> None:
    """Write a layer of an adapter, whose class of all layers is a kind; a hint says what to do with another thing."""
    if not isinstance(layer, kind):
        home = kind.__module__.partition(".")[0]
        raise TypeError(f"expected a layer of {home}; got {type(layer).__name__}{hint or _hint_of(layer)}")
    save_layer(path, layer.definition, *layer.to_numpy())


def load(
    path: str | os.PathLike[str], from_numpy: Callable[..., L], settings: Mapping[str, Any], **placement: Any
) -> L:
    """Make the layer of an adapter that a file holds, with other settings, on a device and in a dtype."""
    definition, *arrays = load_layer(path)
    return from_numpy(definition.with_settings(**settings), *arrays, **placement)


def _hint_of(thing: Any) -> str:
    """What an adapter says of several layers in the place of one, of a definition, and of what holds a layer."""
    if isinstance(thing, layers.Layer):
        return ", a definition: save_layer of attention_files.safetensors writes it with its parameters"
    held = next((name for name in ("_orig_mod", "module") if hasattr(thing, name)), None)
    if held is not None:
        return f": it holds one as its {held}"
    if not isinstance(thing, Iterable) or isinstance(thing, str | os.PathLike):
        return ""
    return ": save_layers of attention_files.safetensors writes definitions and parameters of several"
