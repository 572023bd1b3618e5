"""The library that Keras runs on, by ``KERAS_BACKEND``: its backend here, and what it needs of a layer of Keras."""

from __future__ import annotations

from typing import Any

import keras

from attention_core.backend import Backend, get_backend

LIBRARIES = ("tensorflow", "jax", "torch")


def _backend() -> Backend:
    name = keras.backend.backend()
    if name not in LIBRARIES:
        raise RuntimeError(
            f"expected Keras on {', '.join(LIBRARIES)}, by KERAS_BACKEND before Keras is imported; got Keras on {name}"
        )
    return get_backend(name)


backend: Backend = _backend()


def plain(leaf: Any) -> Any:
    """The tensor of a variable of Keras; anything else as it is."""
    return leaf.value if isinstance(leaf, keras.Variable) else leaf


def variable_name(name: str) -> str:
    """The name of a variable, which in a module of PyTorch has no dots."""
    return name.replace(".", "_") if backend.name == "torch" else name
