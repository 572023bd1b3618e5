"""The layers of `attention_jax` as modules of `flax.nnx`, which hold their values in variables.

Flax is an extra: this module is imported by its own name. ::

    import attention_jax.nnx

    module = attention_jax.nnx.MultiHeadAttention(64, 8, dropout=0.1, rngs=nnx.Rngs(0))
    module.eval()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attention_core.backend import check_flags
from attention_core.layers.adapters import FixedSettings, settings_signature
from attention_jax import layers as pytrees

__all__ = [
    "DecoderLayer",
    "Embeddings",
    "EncoderLayer",
    "FeedForward",
    "GatedFeedForward",
    "Layer",
    "MultiHeadAttention",
    "RMSNorm",
    "SaganAttention",
    "SpectralVector",
]


class SpectralVector(nnx.BatchStat):  # type: ignore[misc]
    """An estimate of a singular vector: like the statistics of a batch, not trained, and advanced in training."""


class Layer(FixedSettings, nnx.Module):  # type: ignore[misc]
    """A layer of `attention_jax`, any of them, as a module.

    Parameters
    ----------
    layer : attention_jax.Layer
        Such as `attention_jax.load` returns; its values are those to start from.
    dtype : dtype, optional
        Inputs and parameters are brought to it; by default to what JAX promotes them to, as in the layers of Flax.
    deterministic : bool
        Whether calls are those of evaluation: without dropout, and with a state that stays. ``train()`` and ``eval()``
        set it.
    rngs : flax.nnx.Rngs, optional
        Its stream ``"dropout"`` is used in training, where there is dropout.

    Raises
    ------
    TypeError
        When this is no layer.

    Examples
    --------
    >>> module = Layer(pytrees.FeedForward.init(0, 4, 16))
    >>> module(jnp.ones((3, 4))).shape
    (3, 4)
    """

    _places: ClassVar[Mapping[str, str]] = {"settings": "module.definition", "parameters": "module.parameters"}

    def __init__(
        self,
        layer: pytrees.Layer,
        /,
        *,
        dtype: Any = None,
        deterministic: bool = False,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        if not isinstance(layer, pytrees.Layer):
            home = type(layer).__module__.partition("._")[0]  # as definitions and modules have the names of layers
            got = f"{home}.{type(layer).__name__}".removeprefix("builtins.")
            raise TypeError(f"expected a layer of attention_jax; got {got}")
        check_flags(deterministic=deterministic)
        if dtype is not None:
            pytrees.floating_name(dtype)
        self.kind = type(layer)
        self.definition = layer.definition
        self.parameters = nnx.data(jax.tree.map(nnx.Param, layer.parameters))
        self.state = nnx.data(jax.tree.map(SpectralVector, layer.state))
        self.dtype = dtype
        self.deterministic = deterministic
        self.rngs = nnx.data(_stream(rngs).fork() if rngs is not None and self._drops else None)

    def with_settings(self, **changes: Any) -> Self:
        definition = self.definition.with_settings(**changes)
        module: Self = nnx.clone(self)
        module.definition = definition
        return module

    def read(self) -> Any:
        return _promoted(self.layer, self.dtype).parameters

    def set_view(self, deterministic: bool | None = None) -> None:
        """Let `flax.nnx.view` say whether calls are those of evaluation.

        Parameters
        ----------
        deterministic : bool, optional
        """
        if deterministic is not None:
            check_flags(deterministic=deterministic)
            self.deterministic = deterministic

    @property
    def layer(self) -> pytrees.Layer:
        """The layer of `attention_jax` with the values that the variables have now."""
        values = jax.tree.map(lambda each: each[...], (self.parameters, self.state), is_leaf=_is_variable)
        return self.kind(self.definition, *values)

    @property
    def _drops(self) -> bool:
        return bool(getattr(self.definition, "dropout", 0))

    def __call__(self, *inputs: Any, deterministic: bool | None = None, rngs: Any = None, **options: Any) -> Any:
        """Apply, as the call of the definition does; in training, advance the state.

        Parameters
        ----------
        *inputs : Array
        deterministic : bool, optional
            By default that of the module.
        rngs : flax.nnx.Rngs, flax.nnx.RngStream, key of jax.random or int, optional
            Of the dropout; by default those of the module.
        **options
            Those of the definition.

        Raises
        ------
        TypeError, ValueError
            When arguments do not fit, or there is nothing to draw what is dropped from.
        """
        deterministic = self.deterministic if deterministic is None else deterministic
        check_flags(deterministic=deterministic)
        training = "rngs=... in training, and deterministic=True to evaluate"
        pytrees.check_call(type(self.definition), inputs, options, training=training)
        layer = self.layer
        key = None if deterministic or not self._drops else _key(self.rngs if rngs is None else rngs)
        inputs, same = _promoted((inputs, layer), self.dtype)
        output = same(*inputs, key=key, **options)
        if not deterministic:
            variables = jax.tree.leaves(self.state, is_leaf=_is_variable)
            for variable, value in zip(variables, jax.tree.leaves(layer.refreshed().state), strict=True):
                variable[...] = value
        return output


class _Made(Layer):
    """A module that makes its layer."""

    kind: type[pytrees.Layer]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls, "kind"):
            cls.kind = getattr(pytrees, cls.__name__)
        if "kind" in vars(cls):
            says = settings_signature(_Made.__init__, cls.kind.kind)
            cls.__signature__ = says.replace(parameters=list(says.parameters.values())[1:])

    def __init__(
        self,
        *settings: Any,
        dtype: Any = None,
        param_dtype: Any = "float32",
        deterministic: bool = False,
        rngs: nnx.Rngs | None = None,
        **named: Any,
    ) -> None:
        if not isinstance(rngs, nnx.Rngs):
            got = "none by keyword" if rngs is None else type(rngs).__name__
            raise TypeError(f"expected rngs as flax.nnx.Rngs, such as rngs=flax.nnx.Rngs(0); got {got}")
        if not ("params" in rngs or "default" in rngs):
            raise ValueError(f"expected rngs with a stream params; got {', '.join(rngs) or 'none'}")
        layer = self.kind.init(rngs.params(), *settings, dtype=param_dtype, **named)
        super().__init__(layer, dtype=dtype, deterministic=deterministic, rngs=rngs)


class MultiHeadAttention(_Made):
    """Multi-head attention with its projections: `attention_jax.MultiHeadAttention` as a module.

    Examples
    --------
    >>> module = MultiHeadAttention(8, num_heads=2, rngs=nnx.Rngs(0))
    >>> module(jnp.ones((3, 5, 8))).shape
    (3, 5, 8)
    """


class FeedForward(_Made):
    """Linear, GELU, linear, dropout, at every position: `attention_jax.FeedForward` as a module.

    Examples
    --------
    >>> FeedForward(4, 16, rngs=nnx.Rngs(0)).parameters.expand.weight.shape
    (4, 16)
    """


class EncoderLayer(_Made):
    """Encoder layer of a transformer: `attention_jax.EncoderLayer` as a module.

    Examples
    --------
    >>> EncoderLayer(8, 2, 32, rngs=nnx.Rngs(0))(jnp.ones((3, 5, 8))).shape
    (3, 5, 8)
    """


class RMSNorm(_Made):
    """Division of the channels by the root of their mean square: `attention_jax.RMSNorm` as a module."""


class GatedFeedForward(_Made):
    """Gated feed-forward block, at every position: `attention_jax.GatedFeedForward` as a module."""


class DecoderLayer(_Made):
    """Decoder layer of a language model: `attention_jax.DecoderLayer` as a module."""


class Embeddings(_Made):
    """Vectors of tokens at absolute positions, in segments: `attention_jax.Embeddings` as a module.

    Examples
    --------
    >>> Embeddings(11, 7, 4, rngs=nnx.Rngs(0))(jnp.asarray([[3, 0, 10]])).shape
    (1, 3, 4)
    """


class SaganAttention(_Made):
    """Self-attention over feature maps, as in SAGAN: `attention_jax.SaganAttention` as a module.

    Examples
    --------
    >>> SaganAttention(16, rngs=nnx.Rngs(0))(jnp.ones((1, 4, 4, 16))).shape
    (1, 4, 4, 16)
    """


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _stream(rngs: Any) -> Any:
    """The stream of dropout."""
    if isinstance(rngs, nnx.Rngs):
        if not ("dropout" in rngs or "default" in rngs):
            raise ValueError(f"expected rngs with a stream dropout; got {', '.join(rngs) or 'none'}")
        return rngs["dropout"]
    if isinstance(rngs, nnx.RngStream):
        return rngs
    raise TypeError(f"expected rngs as flax.nnx.Rngs, such as flax.nnx.Rngs(0); got {type(rngs).__name__}")


def _key(rngs: Any) -> Any:
    if rngs is None:
        raise ValueError("expected rngs with a stream dropout, in training, or deterministic=True; got none")
    if isinstance(rngs, jax.Array | np.ndarray):
        pytrees.check_key("rngs", rngs)
        return rngs
    return rngs if isinstance(rngs, int | np.integer) else _stream(rngs)()


def _promoted(tree: Any, dtype: Any) -> Any:
    """A tree with its arrays of floating point in one dtype."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if _is_floating(leaf)]
    dtype = jnp.result_type(*leaves) if dtype is None and leaves else dtype
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_floating(leaf) else leaf, tree)


def _is_floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
