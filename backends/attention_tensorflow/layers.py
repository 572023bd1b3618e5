"""The layers of `attention_core.layers` as layers of Keras, on its TensorFlow backend.

A layer here holds variables and masks, and knows how Keras trains and saves; what it computes is its definition. It
works wherever a layer of Keras does: in models of every kind, under ``tf.function`` and XLA, with mixed precision, and
in the files of Keras and of TensorFlow.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import random
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import keras
import numpy as np
import tensorflow as tf

from attention_core import Attention
from attention_core import layers as definitions
from attention_core.backend import Array
from attention_core.layers import check_fit, named_arrays, tree_from_names
from attention_core.masks import Mask
from attention_core.random import check_seed, plain_seed
from attention_numpy.trees import known_device
from attention_tensorflow import namespace
from attention_tensorflow.backend import backend

__all__ = [
    "DotProductAttention",
    "Embeddings",
    "EncoderLayer",
    "FeedForward",
    "Layer",
    "MultiHeadAttention",
    "SaganAttention",
    "load",
    "save",
]

AnyLayer = TypeVar("AnyLayer", bound="Layer")
_STATE = "state"  # what the names of a state begin with
_registered = keras.saving.register_keras_serializable(package="attention_core")


def _constructor(kind: type[definitions.Layer]) -> Callable[..., None]:
    """The constructor of a layer, which shows the settings there are."""

    def __init__(self: Layer, *settings: Any, **options: Any) -> None:  # noqa: N807 (it is that)
        Layer.__init__(self, *settings, **options)

    first, *_, seed, rest = inspect.signature(Layer.__init__).parameters.values()
    shown = [first, *inspect.signature(kind).parameters.values(), seed, rest]
    __init__.__signature__ = inspect.Signature(shown, return_annotation=None)  # type: ignore[attr-defined]
    return __init__


class Layer(keras.layers.Layer):  # type: ignore[misc]
    """What the layers share: variables by name, seeds, masks, and the way to NumPy and back.

    Attributes
    ----------
    definition : attention_core.layers.Layer
        The settings, and what is computed.
    """

    kind: ClassVar[type[definitions.Layer]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in vars(cls):
            cls.__init__ = _constructor(cls.kind)  # type: ignore[method-assign]

    def __init__(self, *settings: Any, seed: int | None = None, **kwargs: Any) -> None:
        if keras.backend.backend() != "tensorflow":
            raise RuntimeError(
                "expected Keras on TensorFlow, by KERAS_BACKEND=tensorflow before Keras is imported; "
                f"got Keras on {keras.backend.backend()}"
            )
        if seed is not None:
            seed = operator.index(seed)
            check_seed(seed)
        own = {field.name: kwargs.pop(field.name) for field in fields(self.kind) if field.name in kwargs}
        definition = self.kind(*settings, **own)
        super().__init__(**kwargs)
        self.definition = definition
        self.seed = seed
        # Where a mask would hide nothing, Keras is to warn that it gets lost.
        self.supports_masking = not isinstance(definition, definitions.SaganAttention)
        # Without a seed, the generator that keras.utils.set_random_seed sets gives one, as it does for Keras's layers.
        self._start = random.randint(1, 10**9) if seed is None else seed
        self._first: Callable[[], tuple[Any, Any]] = self._drawn
        self._seeds = None
        if getattr(definition, "dropout", 0) > 0:
            self._seeds = keras.random.SeedGenerator(self._start % 2**32)

    def build(self, input_shape: Any = None) -> None:
        """Make the variables. Their sizes are settings, so that a shape need not be given."""
        with tf.init_scope():
            parameters, state = self._first()
            first = {True: named_arrays(parameters), False: named_arrays(state, _STATE)}
        # Keras would cast variables to the compute dtype, but the state advances in that of the variables.
        self._own = {
            name: self.add_weight(
                shape=tuple(value.shape),
                initializer=lambda shape, dtype, value=value: tf.constant(value, dtype),
                trainable=trainable,
                autocast=False,
                name=name,
            )
            for trainable, values in first.items()
            for name, value in backend.to_numpy(values).items()
        }

    def get_config(self) -> dict[str, Any]:
        """The settings, the seed, and what Keras adds."""
        return {**super().get_config(), **_settings(self.definition), "seed": self.seed}

    def compute_output_spec(self, *inputs: Any, **options: Any) -> Any:
        """Shapes and dtypes of what a call returns."""
        self._ensure_built()
        return super(keras.layers.Layer, self).compute_output_spec(*inputs, **options)

    def compute_output_shape(self, input_shape: Any, *others: Any) -> tuple[int | None, ...]:
        """The shape of the output, given those of the inputs."""
        dtype = "int32" if self.kind is definitions.Embeddings else self.compute_dtype
        inputs = (
            keras.tree.map_shape_structure(lambda dims: keras.KerasTensor(dims, dtype), shape)
            for shape in (input_shape, *others)
        )
        return tuple(self.compute_output_spec(*inputs).shape)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        """The mask of the input, or of the query."""
        return previous_mask.get("query") if isinstance(previous_mask, Mapping) else previous_mask

    def to_numpy(self) -> tuple[Any, Any]:
        """The parameters and the state, as trees of NumPy arrays, bit for bit."""
        self._ensure_built()
        return backend.to_numpy(self._trees(self.variable_dtype))  # type: ignore[no-any-return]

    @classmethod
    def from_numpy(
        cls: type[AnyLayer],
        definition: definitions.Layer,
        parameters: Any,
        state: Any = (),
        *,
        device: str | None = None,
        dtype: str | None = None,
    ) -> AnyLayer:
        """Make a layer of trees of NumPy arrays.

        Parameters
        ----------
        definition : attention_core.layers.Layer
        parameters, state : trees of numpy.ndarray
            As `to_numpy` returns them.
        device : str, optional
            One of ``backend.devices()``.
        dtype : str, optional
            A floating-point type or a dtype policy of Keras; by default the type of the arrays, bit for bit.

        Raises
        ------
        TypeError, ValueError
            When the definition is not one of the class, or the arrays do not fit it.
        """
        made = _LAYERS.get(type(definition)) if cls is Layer else cls
        if made is None or not isinstance(definition, made.kind):
            raise TypeError(f"expected the definition of a {cls.__name__}; got {type(definition).__name__}")
        check_fit(definition, parameters, state)
        dtypes = {array.dtype.name for array in [*named_arrays(parameters).values(), *named_arrays(state).values()]}
        if dtype is None and len(dtypes) > 1:
            raise ValueError(f"expected arrays of one dtype, or a dtype; got {', '.join(sorted(dtypes))}")
        with contextlib.nullcontext() if device is None else tf.device(known_device(device, backend.devices())):
            layer = made(**_settings(definition), dtype=dtype or next(iter(dtypes), None))
            arrays = backend.from_numpy((parameters, state), dtype=layer.variable_dtype)
            layer._first = lambda: arrays
            layer.build()
        layer._first = layer._drawn
        return layer

    def _drawn(self) -> tuple[Any, Any]:
        """The first values under the seed."""
        options = {"xp": namespace, "dtype": self.variable_dtype}
        return self.definition.init(self._start, **options), self.definition.init_state(self._start, **options)

    def _ensure_built(self) -> None:
        if not self.built:
            self.build()

    def _trees(self, dtype: str) -> tuple[Any, Any]:
        """The parameters and the state, as tensors."""
        leaves = {name: tf.cast(tf.convert_to_tensor(own.value), dtype) for name, own in self._own.items()}
        parameters, state = self.definition.parameters, self.definition.state
        return tree_from_names(parameters, leaves), tree_from_names(state, leaves, _STATE)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _apply(self, *inputs: Any, training: bool | None, seed: Any = None, **options: Any) -> Any:
        """Call the definition, and in training advance the state."""
        if training and self._seeds is not None:
            options["seed"] = self._seeds.next() if seed is None else plain_seed(seed, _is_array)
        parameters, state = self._trees(self.compute_dtype)
        if state:
            options["state"] = state
        result = self.definition(parameters, *inputs, **options, xp=namespace)  # type: ignore[operator]
        if state and training:
            advanced = self.definition.refreshed(*self._trees(self.variable_dtype), xp=namespace)
            for name, value in named_arrays(advanced, _STATE).items():
                self._own[name].assign(value)
        return _found(result)


def _is_array(seed: Any) -> bool:
    return hasattr(seed, "dtype") and not isinstance(seed, np.generic)


class _AttentionLayer(Layer):
    """A layer with a mask over pairs, and Keras's masks over the places of its inputs."""

    def __call__(self, *inputs: Any, mask: Mask | Array | None = None, **options: Any) -> Any:
        """Call the layer, in every way in which a layer of Keras is called."""
        if mask is not None:
            if options.get("attention_mask") is not None:
                raise TypeError("expected mask, or attention_mask, which is the same; got both")
            options["attention_mask"] = mask  # by its own name, Keras would take it for the mask of the places
        return super().__call__(*inputs, **options)


@_registered
class DotProductAttention(_AttentionLayer):
    """Scaled dot-product attention of one head, without weights, as a layer of Keras.

    Parameters
    ----------
    scale, softcap, is_causal, dropout, implementation
        As in `attention_core.layers.DotProductAttention`.
    seed : int, optional
        Of the dropout.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Raises
    ------
    TypeError, ValueError
        When a setting is not one.
    RuntimeError
        When Keras does not run on TensorFlow.

    Examples
    --------
    >>> import tensorflow as tf
    >>> keys = tf.reshape(tf.range(40.0), (1, 10, 4))
    >>> layer = DotProductAttention()
    >>> layer(tf.ones((1, 2, 4)), tf.ones((1, 10, 4)), keys)[0, 0].numpy().tolist()
    [18.0, 19.0, 20.0, 21.0]
    """

    kind = definitions.DotProductAttention

    def call(
        self,
        query: Any,
        key: Array | None = None,
        value: Array | None = None,
        *,
        attention_mask: Mask | Array | None = None,
        query_mask: Array | None = None,
        key_mask: Array | None = None,
        bias: Array | None = None,
        seed: Any = None,
        return_weights: bool = False,
        return_logsumexp: bool = False,
        training: bool | None = None,
    ) -> Any:
        """Attend.

        Parameters
        ----------
        query : tensor, shape (..., M, D), or a mapping with "query", "key" and "value"
        key : tensor, shape (..., N, D), optional
            By default the query.
        value : tensor, shape (..., N, E), optional
            By default the key.
        attention_mask : attention_core.masks.Mask or bool tensor, broadcastable to (..., M, N), optional
            True = may attend. A call of the layer also takes it as ``mask``, its name in all the libraries.
        query_mask, key_mask : bool tensor, shape (..., M) and (..., N), optional
            By default the masks that Keras attached to the inputs. A query that is masked out gives exactly 0.
        bias : tensor, broadcastable to (..., M, N), optional
        seed : int or integer tensor, optional
            Of the dropout, instead of one drawn from the layer's generator.
        return_weights, return_logsumexp : bool
        training : bool, optional
            Whether weights are dropped.

        Returns
        -------
        tensor, shape (..., M, E)
            Or, if a return flag is set, a named tuple of output, and of weights and logsumexp where asked for.
        """
        query_mask, key_mask = _place_masks(query, key, value, query_mask, key_mask)
        return self._apply(
            query,
            key,
            value,
            mask=attention_mask,
            query_mask=query_mask,
            key_mask=key_mask,
            bias=bias,
            seed=seed,
            return_weights=return_weights,
            return_logsumexp=return_logsumexp,
            training=training,
        )


@_registered
class MultiHeadAttention(_AttentionLayer):
    """Multi-head attention with its projections, as a layer of Keras.

    Parameters
    ----------
    channels, num_heads, num_key_value_heads, key_channels, value_channels, head_dim, value_head_dim
        As in `attention_core.layers.MultiHeadAttention`, and so are all that follow.
    output, output_channels, bias, query_bias, key_bias, value_bias, output_bias, extra_key_value, zero_attention
    scale, softcap, is_causal, dropout, implementation
    seed : int, optional
        Of the first weights, which are then the same on every framework, and of the dropout.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Raises
    ------
    TypeError, ValueError
        When a setting is not one, or heads do not share out the channels evenly.
    RuntimeError
        When Keras does not run on TensorFlow.

    References
    ----------
    A. Vaswani et al., "Attention is all you need", 2017.

    Examples
    --------
    >>> import tensorflow as tf
    >>> layer = MultiHeadAttention(8, 2, seed=0)
    >>> layer(tf.ones((3, 5, 8))).shape
    TensorShape([3, 5, 8])
    >>> layer({"query": tf.ones((3, 5, 8)), "key": tf.ones((3, 7, 8))}).shape
    TensorShape([3, 5, 8])
    """

    kind = definitions.MultiHeadAttention

    def call(
        self,
        query: Any,
        key: Array | None = None,
        value: Array | None = None,
        *,
        attention_mask: Mask | Array | None = None,
        query_mask: Array | None = None,
        key_mask: Array | None = None,
        bias: Array | None = None,
        score_mod: Callable[..., Array] | None = None,
        prepare: Callable[[Array, Array], tuple[Array, Array]] | None = None,
        seed: Any = None,
        return_weights: bool = False,
        return_logsumexp: bool = False,
        training: bool | None = None,
    ) -> Any:
        """Attend.

        Parameters
        ----------
        query : tensor, shape (..., M, C), or a mapping with "query", "key" and "value"
        key : tensor, shape (..., N, C'), optional
            By default the query.
        value : tensor, shape (..., N, C''), optional
            By default the key.
        attention_mask : attention_core.masks.Mask or bool tensor, broadcastable to (..., H, M, N), optional
            True = may attend. A call of the layer also takes it as ``mask``, its name in all the libraries.
        query_mask, key_mask : bool tensor, shape (..., M) and (..., N), optional
            By default the masks that Keras attached to the inputs, as `keras.layers.MultiHeadAttention` uses them.
            The heads of a query that is masked out are exactly 0, so that its output is the bias of the output.
        bias, score_mod, prepare
            As in `attention_core.multi_head_attention`.
        seed : int or integer tensor, optional
            Of the dropout, instead of one drawn from the layer's generator.
        return_weights, return_logsumexp : bool
        training : bool, optional
            Whether weights are dropped.

        Returns
        -------
        tensor, shape (..., M, channels of the output)
            Or, if a return flag is set, a named tuple of output, and of weights and logsumexp where asked for.
        """
        query_mask, key_mask = _place_masks(query, key, value, query_mask, key_mask)
        return self._apply(
            query,
            key,
            value,
            mask=attention_mask,
            query_mask=query_mask,
            key_mask=key_mask,
            bias=bias,
            score_mod=score_mod,
            prepare=prepare,
            seed=seed,
            return_weights=return_weights,
            return_logsumexp=return_logsumexp,
            training=training,
        )


@_registered
class FeedForward(Layer):
    """Linear, GELU, linear, dropout, at every position, as a layer of Keras.

    Parameters
    ----------
    channels, inner, output_channels, bias, dropout
        As in `attention_core.layers.FeedForward`.
    seed : int, optional
        Of the first weights, which are then the same on every framework, and of the dropout.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Raises
    ------
    TypeError, ValueError
        When a setting is not one.
    RuntimeError
        When Keras does not run on TensorFlow.

    Examples
    --------
    >>> import tensorflow as tf
    >>> layer = FeedForward(4, 16, output_channels=3)
    >>> layer(tf.ones((2, 4))).shape
    TensorShape([2, 3])
    """

    kind = definitions.FeedForward

    def call(self, x: Array, *, seed: Any = None, training: bool | None = None) -> Array:
        """Apply to every position: (..., channels) -> (..., channels of the output)."""
        return self._apply(x, seed=seed, training=training)


@_registered
class EncoderLayer(_AttentionLayer):
    """Encoder layer of a transformer, as a layer of Keras.

    Parameters
    ----------
    channels, num_heads, inner, norm_first, bias, epsilon, dropout, implementation
        As in `attention_core.layers.EncoderLayer`.
    seed : int, optional
        Of the first weights, which are then the same on every framework, and of the dropout.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Raises
    ------
    TypeError, ValueError
        When a setting is not one, or heads do not share out the channels evenly.
    RuntimeError
        When Keras does not run on TensorFlow.

    Examples
    --------
    >>> model = keras.Sequential([keras.layers.Embedding(9, 4, mask_zero=True), EncoderLayer(4, 2, 16)])
    >>> model(keras.ops.array([[3, 1, 0]])).shape  # the last token is padding, and attended by none
    TensorShape([1, 3, 4])
    """

    kind = definitions.EncoderLayer

    def call(
        self,
        x: Array,
        *,
        attention_mask: Mask | Array | None = None,
        key_mask: Array | None = None,
        seed: Any = None,
        training: bool | None = None,
    ) -> Array:
        """Apply to sequences: (..., L, C) -> (..., L, C).

        Parameters
        ----------
        x : tensor, shape (..., L, C)
        attention_mask : attention_core.masks.Mask or bool tensor, broadcastable to (..., H, L, L), optional
            True = may attend. A call of the layer also takes it as ``mask``, its name in all the libraries.
        key_mask : bool tensor, shape (..., L), optional
            By default the mask that Keras attached to ``x``. Places masked out are attended by none, and attend
            the others; nothing else depends on what they become.
        seed : int or integer tensor, optional
            Of the dropout, instead of one drawn from the layer's generator.
        training : bool, optional
            Whether anything is dropped.

        Returns
        -------
        tensor, shape (..., L, C)
        """
        key_mask = _attached(x) if key_mask is None else key_mask
        return self._apply(x, mask=attention_mask, key_mask=key_mask, seed=seed, training=training)


@_registered
class Embeddings(Layer):
    """Vectors of tokens at absolute positions, in segments, normalized, with dropout, as a layer of Keras.

    Parameters
    ----------
    num_tokens, num_positions, channels, num_segments, norm, epsilon, dropout
        As in `attention_core.layers.Embeddings`.
    seed : int, optional
        Of the first weights, which are then the same on every framework, and of the dropout.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Raises
    ------
    TypeError, ValueError
        When a setting is not one.
    RuntimeError
        When Keras does not run on TensorFlow.

    Examples
    --------
    >>> import tensorflow as tf
    >>> layer = Embeddings(100, 16, 4)
    >>> layer(tf.constant([[3, 1, 4]])).shape
    TensorShape([1, 3, 4])
    """

    kind = definitions.Embeddings

    def call(
        self,
        token_ids: Array,
        *,
        position_ids: Array | None = None,
        segment_ids: Array | None = None,
        seed: Any = None,
        training: bool | None = None,
    ) -> Array:
        """Look up: integers (..., L) -> (..., L, C). Ids are those of `attention_core.embed_tokens`."""
        return self._apply(token_ids, position_ids=position_ids, segment_ids=segment_ids, seed=seed, training=training)


@_registered
class SaganAttention(Layer):
    """Self-attention over feature maps, as in SAGAN, as a layer of Keras.

    The vectors of spectral normalization are weights that are not trained. They advance in training, by the step of
    power iteration that the call takes.

    Parameters
    ----------
    channels, head_channels, value_channels, output, output_channels, bias, pool, spectral_norm, data_format
        As in `attention_core.layers.SaganAttention`.
    seed : int, optional
        Of the first weights, which are then the same on every framework.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Raises
    ------
    TypeError, ValueError
        When a setting is not one, or the result would not have C channels.
    RuntimeError
        When Keras does not run on TensorFlow.

    References
    ----------
    H. Zhang, I. Goodfellow, D. Metaxas, A. Odena, "Self-attention generative adversarial networks", 2018.

    Examples
    --------
    >>> import tensorflow as tf
    >>> layer, x = SaganAttention(16), tf.ones((1, 4, 4, 16))
    >>> bool(tf.reduce_all(layer(x) == x))  # sigma starts at 0
    True
    """

    kind = definitions.SaganAttention

    def call(self, x: Array, *, return_weights: bool = False, training: bool | None = None) -> Any:
        """Let every place attend all places.

        Parameters
        ----------
        x : tensor, shape (..., height, width, C)
            Or (..., C, height, width) with ``channels_first``.
        return_weights : bool
        training : bool, optional
            Whether the vectors of spectral normalization advance.

        Returns
        -------
        tensor
            Of the shape of ``x``; with ``return_weights``, a named tuple of output and weights.
        """
        return self._apply(x, return_weights=return_weights, training=training)


_LAYERS: dict[type[definitions.Layer], type[Layer]] = {
    layer.kind: layer
    for layer in (DotProductAttention, MultiHeadAttention, FeedForward, EncoderLayer, Embeddings, SaganAttention)
}


def save(layer: Layer, path: str | Path) -> None:
    """Write a layer to a file that every library of this project reads, bit for bit.

    Parameters
    ----------
    layer : Layer
    path : str or Path

    Examples
    --------
    >>> import tempfile
    >>> layer = FeedForward(4, 16)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(layer, f"{folder}/layer.safetensors")
    ...     load(f"{folder}/layer.safetensors").definition == layer.definition
    True
    """
    from attention_numpy.files import save_layer  # noqa: PLC0415 (only who saves needs what files need)

    save_layer(path, layer.definition, *layer.to_numpy())


def load(path: str | Path, *, device: str | None = None, dtype: str | None = None) -> Layer:
    """Make a layer of a file that `save` wrote, on this library or another.

    Parameters
    ----------
    path : str or Path
    device : str, optional
        One of ``backend.devices()``.
    dtype : str, optional
        A floating-point type or a dtype policy of Keras; by default the type of the file, bit for bit.

    Returns
    -------
    Layer
        Of the class that the file names.

    Raises
    ------
    TypeError, ValueError
        When the file is not one of a layer, or there is no such device or type.
    """
    from attention_numpy.files import load_layer  # noqa: PLC0415 (only who loads needs what files need)

    return Layer.from_numpy(*load_layer(path), device=device, dtype=dtype)


def _settings(definition: definitions.Layer) -> dict[str, Any]:
    return {name: value for name, value in definition.settings().items() if name != "layer"}


@functools.cache
def _result(names: tuple[str, ...]) -> Any:
    return Attention if names == Attention._fields else namedtuple("Attention", names)


def _found(result: Any) -> Any:
    """A result without what was not asked for: an output of a layer of Keras is a tensor, never ``None``."""
    if not isinstance(result, Attention):
        return result
    found = {name: value for name, value in result._asdict().items() if value is not None}
    return _result(tuple(found))(**found)


def _attached(x: Any) -> Any:
    """The mask that Keras attached to a tensor."""
    return getattr(x, "_keras_mask", None)


def _place_masks(query: Any, key: Any, value: Any, query_mask: Any, key_mask: Any) -> tuple[Any, Any]:
    """The masks over queries and over keys: those given, or else those that Keras attached to the inputs."""
    if isinstance(query, Mapping):
        query, key, value = (query.get(name) for name in ("query", "key", "value"))
    if query_mask is None:
        query_mask = _attached(query)
    if key_mask is None:
        key_mask = _attached(query if key is None else key)
    masks = [mask for mask in (key_mask, _attached(value)) if mask is not None]
    return query_mask, functools.reduce(operator.and_, masks) if masks else None
