"""Trees of this project in programs that `jax.export` writes: each node by a name, with its static part as JSON."""

from __future__ import annotations

import contextlib
import json
from types import ModuleType
from typing import Any

from jax import export

import attention_core
from attention_core import cache, layers, parameters, pieces
from attention_core.layers import layer_from_settings


def register_layer(kind: type[Any], /) -> None:
    """Let programs take layers of a class, a pytree, as arguments."""

    def encoded(definitions: Any) -> bytes:
        (definition,) = definitions
        return json.dumps(definition.settings()).encode()

    def decoded(text: bytes | bytearray) -> Any:
        return (layer_from_settings(json.loads(bytes(text))),)

    def built(definitions: Any, leaves: Any) -> Any:
        return kind(*definitions, *leaves)

    options = {"serialize_auxdata": encoded, "deserialize_auxdata": decoded, "from_children": built}
    with contextlib.suppress(ValueError):  # a class that is defined again in a notebook has the name of the former one
        export.register_pytree_node_serialization(kind, serialized_name=_name(kind), **options)


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def register_tuples(room: ModuleType, /) -> None:
    """Let programs take the named tuples of a public module as arguments."""
    for kind in vars(room).values():
        if isinstance(kind, type) and issubclass(kind, tuple) and "._" not in kind.__module__:
            with contextlib.suppress(ValueError):  # some stand in two rooms
                export.register_namedtuple_serialization(kind, serialized_name=_name(kind))


for _room in (attention_core, cache, pieces, parameters, layers):
    register_tuples(_room)
