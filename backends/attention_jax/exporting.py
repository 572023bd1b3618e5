"""Trees of this project in programs that `jax.export` writes: each node by a name, with its static part as JSON."""

from __future__ import annotations

import contextlib
import json
from types import ModuleType
from typing import Any

from jax import export

import attention_core
from attention_core import cache, layers, parameters, pieces
from attention_core.backend import registered, registered_name
from attention_core.layers import layer_from_settings
from attention_core.masks import Leaf

_masks: dict[str, type[Any]] = {}  # by their names in a program


def register_layer(kind: type[Any], /) -> None:
    """Let programs take layers of a class, a pytree, as arguments."""

    def encoded(definitions: Any) -> bytes:
        (definition,) = definitions
        return json.dumps(definition.settings()).encode()

    def decoded(text: bytes | bytearray) -> Any:
        return (layer_from_settings(json.loads(bytes(text))),)

    def built(definitions: Any, leaves: Any) -> Any:
        return kind(*definitions, *leaves)

    _register(kind, encoded, decoded, built)


def register_mask_class(kind: type[Any], /) -> None:
    """Let programs take masks of a class, a pytree, as arguments."""
    _masks[_name(kind)] = kind
    _register(kind, lambda form: json.dumps(_plain(form)).encode(), lambda text: _form(json.loads(bytes(text))), None)


def _register(kind: type[Any], encode: Any, decode: Any, build: Any) -> None:
    options = {"serialize_auxdata": encode, "deserialize_auxdata": decode, "from_children": build}
    with contextlib.suppress(ValueError):  # a class that is defined again in a notebook has the name of the former one
        export.register_pytree_node_serialization(kind, serialized_name=_name(kind), **options)


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _plain(form: Any) -> Any:
    """The form of a mask as JSON: classes and leaves are dictionaries, tuples are lists."""
    if isinstance(form, Leaf):
        return {"leaf": list(form)}
    if isinstance(form, tuple):
        return [_plain(each) for each in form]
    if form is None or isinstance(form, bool | int | float | str):
        return form
    if form is tuple:
        return {"class": "tuple"}
    name = registered_name(form) or (_name(form) if isinstance(form, type) else "")
    if registered(name) is not form and _masks.get(name) is not form:
        raise ValueError(f"expected masks of registered classes, without functions, in an exported program; got {form}")
    return {"class": name}


def _form(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(map(_form, plain))
    if not isinstance(plain, dict):
        return plain
    if "leaf" in plain:
        return Leaf(*plain["leaf"])
    name = plain["class"]
    kind = tuple if name == "tuple" else _masks.get(name, registered(name))
    if kind is None:  # nothing is imported because some file asks for it
        raise ValueError(f"expected a program whose masks register_mask knows; got {name}")
    return kind


def register_tuples(room: ModuleType, /) -> None:
    """Let programs take the named tuples of a public module as arguments."""
    for kind in vars(room).values():
        if isinstance(kind, type) and issubclass(kind, tuple) and "._" not in kind.__module__:
            with contextlib.suppress(ValueError):  # some stand in two rooms
                export.register_namedtuple_serialization(kind, serialized_name=_name(kind))


for _room in (attention_core, cache, pieces, parameters, layers):
    register_tuples(_room)
