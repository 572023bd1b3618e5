"""Layers of attention of Keras into layers of this project, and back, with their weights bit for bit."""

from __future__ import annotations

from typing import Any

import keras

from attention_keras.layers import Layer
from attention_keras.library import backend
from attention_models.layouts import LAYOUTS, LayoutError

__all__ = ["from_module", "to_module"]

LAYERS = {keras.layers.MultiHeadAttention: "keras", keras.layers.GroupQueryAttention: "keras-grouped"}
ABSENT = (
    "sliding_window",
    "kernel_regularizer",
    "bias_regularizer",
    "activity_regularizer",
    "kernel_constraint",
    "bias_constraint",
)
"""Settings of Keras's layers that have no place here."""


def from_module(module: keras.layers.Layer, /) -> Any:
    """Make a layer of one of Keras, with copies of its weights and under its dtype policy.

    Parameters
    ----------
    module : keras.layers.MultiHeadAttention or keras.layers.GroupQueryAttention
        Once it has weights. It is called with query, value, key; the layer made of it with query, key, value.

    Returns
    -------
    Layer

    Raises
    ------
    TypeError
        When the layer is of another class; classes derived from these may compute something else.
    attention_models.layouts.LayoutError
        When it has no weights yet, or a setting that cannot be carried over; the message names it.

    Examples
    --------
    >>> theirs = keras.layers.MultiHeadAttention(2, 4)
    >>> theirs.build((None, None, 8), (None, None, 8))
    >>> ours, x = from_module(theirs), keras.ops.ones((1, 3, 8))
    >>> bool(keras.ops.all(keras.ops.isclose(ours(x), theirs(x, x))))
    True
    """
    name = _name(type(module), _hint(module))
    layout = LAYOUTS[name].module
    config = module.get_config()
    if not module.built:
        raise LayoutError(f"expected {layout} with weights; got one that has not been built")
    for setting in ABSENT:
        if config[setting] is not None:
            raise LayoutError(f"expected no {setting} of {layout}, which has no place here; got {config[setting]}")
    axes = config.get("attention_axes")
    if axes is not None and tuple(axes) != (1,):
        raise LayoutError(f"expected attention_axes (1,) of {layout}; got {tuple(axes)}")
    arrays = {
        "/".join(variable.path.split("/")[-2:]): backend.to_numpy(variable.value) for variable in _weights(module)
    }
    definition, parameters = LAYOUTS[name].read(arrays, dropout=config["dropout"])
    layer = Layer.from_numpy(definition, parameters, dtype=module.dtype_policy.name)
    layer.trainable = module.trainable
    return layer


def to_module(layer: Layer, kind: type[keras.layers.Layer], /) -> keras.layers.Layer:
    """Make a layer of Keras, with copies of the weights and under the same dtype policy: undoes `from_module`.

    Parameters
    ----------
    layer : Layer
    kind : type
        `keras.layers.MultiHeadAttention` or `keras.layers.GroupQueryAttention`.

    Returns
    -------
    keras.layers.Layer

    Raises
    ------
    TypeError
        When the class is another one.
    attention_models.layouts.LayoutError
        When the layer has a setting that the class has not; the message names it.

    Examples
    --------
    >>> from attention_keras import MultiHeadAttention
    >>> to_module(MultiHeadAttention(8, 2), keras.layers.MultiHeadAttention).key_dim
    4
    """
    name = _name(kind)
    if not isinstance(layer, Layer):
        raise TypeError(f"expected a layer of attention_keras; got {type(layer).__name__}")
    definition, parameters = layer.definition, layer.to_numpy()[0]
    arrays = LAYOUTS[name].write(definition, parameters)
    module = kind(**LAYOUTS[name].arguments(definition), dtype=layer.dtype_policy)
    query, key, value = ((None, None, each.weight.shape[0]) for each in parameters[:3])
    module.build(query, value, key)
    for variable in _weights(module):
        variable.assign(arrays.pop("/".join(variable.path.split("/")[-2:])))
    return module


def _hint(module: Any) -> str:
    """What to write instead of a layer or a model of which only parts are known."""
    if isinstance(module, Layer):
        return ", which is a layer of attention_keras already"
    parts = [each.name for each in getattr(module, "layers", ()) if type(each) in LAYERS]
    return f": from_module takes layers of it, such as its {parts[0]}" if parts else ""


def _name(kind: type[Any], hint: str = "") -> str:
    if kind not in LAYERS:
        known = ", ".join(LAYOUTS[name].module for name in LAYERS.values())
        raise TypeError(f"expected a layer out of {known}; got {getattr(kind, '__name__', kind)}{hint}")
    return LAYERS[kind]


def _weights(module: Any) -> list[Any]:
    """The variables, less those of generators: what a layer of Keras may have besides is not to get lost."""
    return [variable for variable in module.weights if variable.path.rsplit("/", 1)[-1] != "seed_generator_state"]
