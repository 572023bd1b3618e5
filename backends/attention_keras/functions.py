"""Functions of `attention_core` that also take symbols of Keras, such as `keras.Input`, inside functional models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

import attention_core
from attention_core import functions
from attention_core.backend import unconverted
from attention_keras.layer import named_results
from attention_keras.library import plain

__all__ = ["FunctionCall", "gelu", "rms_norm", "rotary_embedding", "scaled_dot_product_attention", "silu"]

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "gelu": functions.gelu,
    "rms_norm": functions.rms_norm,
    "rotary_embedding": functions.rotary_embedding,
    "scaled_dot_product_attention": attention_core.scaled_dot_product_attention,
    "silu": functions.silu,
}


@keras.saving.register_keras_serializable(package="attention_core")
class FunctionCall(keras.Operation):  # type: ignore[misc]
    """A call of a function with these options, as an operation of a functional model.

    Parameters
    ----------
    function : str
        One of the functions of this module.
    options : dict, optional
        What a file of Keras can hold: numbers, text and truth values.
    name : str, optional
        Of the operation.

    Raises
    ------
    ValueError
        When there is no such function.
    """

    def __init__(self, function: str, options: dict[str, Any] | None = None, *, name: str | None = None) -> None:
        super().__init__(name=name)
        if function not in _FUNCTIONS:
            raise ValueError(f"expected a function out of {', '.join(_FUNCTIONS)}; got {function!r}")
        self.function = function
        self.options = dict(options or {})

    def call(self, *arrays: Any, **named: Any) -> Any:
        """Call the function with arrays."""
        return named_results(_FUNCTIONS[self.function](*arrays, **named, **self.options))

    def get_config(self) -> dict[str, Any]:
        """The function, its options, and the name of the operation."""
        return {"function": self.function, "options": self.options, "name": self.name}


def _called(function: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a function of the core; with a symbol among the arrays, as an operation of a model."""
    arrays, options = tuple(map(plain, arrays)), {name: plain(value) for name, value in options.items()}
    if not any(isinstance(each, keras.KerasTensor) for each in (*arrays, *options.values())):
        return _FUNCTIONS[function](*arrays, **options)
    named = {name: value for name, value in options.items() if hasattr(value, "dtype")}
    fixed = {name: value for name, value in options.items() if name not in named}
    return FunctionCall(function, fixed)(*arrays, **named)


def scaled_dot_product_attention(query: Any, key: Any, value: Any, /, **options: Any) -> Any:
    """Attend, as `attention_core.scaled_dot_product_attention` does, to arrays or to symbols of Keras.

    Parameters
    ----------
    query, key, value : tensor or keras.KerasTensor
        Of the shapes that the function of the core takes.
    **options
        Its options. A model with rules of `attention_core.masks` cannot be saved; one with ``is_causal`` or arrays can.

    Returns
    -------
    tensor or keras.KerasTensor
        Or, if a return flag is set, a named tuple. For a symbol, it holds only what was asked for.

    Examples
    --------
    >>> x = keras.Input((2, 5, 4))
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).shape
    (None, 2, 5, 4)
    """
    return _called("scaled_dot_product_attention", (query, key, value), options)


def rotary_embedding(x: Any, positions: Any, /, **options: Any) -> Any:
    """Rotate pairs of channels by position, as `attention_core.functions.rotary_embedding` does, also of symbols."""
    return _called("rotary_embedding", (x, positions), options)


def rms_norm(scale: Any, x: Any, /, **options: Any) -> Any:
    """Divide by the root mean square, as `attention_core.functions.rms_norm` does, also symbols of Keras."""
    return _called("rms_norm", (scale, x), options)


def gelu(x: Any, /, **options: Any) -> Any:
    """Apply the GELU, as `attention_core.functions.gelu` does, also to symbols of Keras."""
    return _called("gelu", (x,), options)


def silu(x: Any, /, **options: Any) -> Any:
    """Apply the SiLU, as `attention_core.functions.silu` does, also to symbols of Keras."""
    return _called("silu", (x,), options)


for _name in _FUNCTIONS:
    unconverted(vars()[_name])
