"""A layer of `attention_core.layers` as a layer of Keras: variables by name, seeds, masks, and NumPy and back."""

from __future__ import annotations

import contextlib
import functools
import operator
import random
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

import keras
import numpy as np
from keras.src.backend import get_keras_mask as attached  # also of an array of JAX, which has no place for it

from attention_core import Attention, layers as definitions
from attention_core.backend import Array, check_flags, get_backend, keyword_error, names_of, unconverted
from attention_core.layers import named_arrays, tree_from_names
from attention_core.layers.adapters import Adapted, call_of, constructor, described
from attention_core.masks import Mask
from attention_core.random import check_seed, plain_seed
from attention_keras.library import backend, plain, variable_name
from attention_numpy.trees import known_device

_NUMPY = get_backend("numpy")
_STATE = "state"  # what the names of a state begin with


@unconverted
class Layer(Adapted, keras.layers.Layer):  # type: ignore[misc]
    """What the layers share: variables by name, seeds, masks, and the way to NumPy and back.

    Parameters
    ----------
    *settings, **named
        The fields of the class of the same name in `attention_core.layers`.
    seed : int, optional
        Of the first weights, which are then the same on every framework, and of the dropout.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Attributes
    ----------
    definition : attention_core.layers.Layer
        The settings, and what is computed.
    """

    _places: ClassVar[Mapping[str, str]] = {"settings": "layer.definition", "parameters": "layer.to_numpy()[0]"}
    _classes: ClassVar[dict[type[definitions.Layer], type[Layer]]] = {}

    @classmethod
    def _complete(cls) -> None:
        cls.__init__ = constructor(Layer, cls.kind, keeps_rest=True)  # type: ignore[method-assign]
        cls.__doc__ = described(cls.kind.__doc__, Layer.__doc__, class_doc=cls.__doc__)
        renamed, words = {"mask": "attention_mask"}, Layer._call.__doc__
        cls.call = call_of(cls.kind, "call", renamed=renamed, added=["training"], words=words)
        keras.saving.register_keras_serializable(package="attention_core")(cls)

    def __init__(self, *settings: Any, seed: int | None = None, **kwargs: Any) -> None:
        if seed is not None:
            check_seed(seed := plain_seed(seed, lambda _: False))
        options = {field.name: kwargs.pop(field.name) for field in fields(self.kind) if field.name in kwargs}
        try:
            super().__init__(**kwargs)
        except ValueError as error:
            if "keyword" not in str(error):
                raise
            names: Any = names_of(self.kind.__init__)
            raise keyword_error(self.kind.__name__, names, _unknown(kwargs)) from None
        definition = self.kind(*settings, **options)
        self.definition = definition
        self.seed = seed
        # Where a mask would hide nothing, Keras is to warn that it gets lost.
        self.supports_masking = not isinstance(definition, definitions.SaganAttention)
        # Without a seed, the generator that keras.utils.set_random_seed sets gives one, as it does for Keras's layers.
        self._start = random.randint(1, 10**9) if seed is None else seed
        self._first: Callable[[], tuple[Any, Any]] = self._drawn
        self._seeds = None
        if getattr(definition, "dropout", 0) > 0:
            self._seeds = keras.random.SeedGenerator(self._start % 2**31)  # PyTorch has no wider state

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Call the layer, in every way in which a layer of Keras is called."""
        try:
            return super().__call__(*inputs, **options)
        except TypeError:
            names: Any = names_of(self.call)
            known = () if names is None else (*names.keywords, "mask")
            for option in options if names else ():
                if option not in known:
                    raise keyword_error(self.kind.__name__, names._replace(keywords=known), option) from None
            raise

    def build(self, input_shape: Any = None) -> None:
        """Make the variables. Their sizes are settings, so that a shape need not be given."""
        parameters, state = self._first()
        first = {True: named_arrays(parameters), False: named_arrays(state, _STATE)}
        # Keras would cast variables to the compute dtype, but the state advances in that of the variables.
        self._own = {
            name: self.add_weight(
                shape=tuple(value.shape),
                initializer=lambda shape, dtype, value=value: backend.from_numpy(value),
                trainable=trainable,
                autocast=False,
                name=variable_name(name),
            )
            for trainable, values in first.items()
            for name, value in values.items()
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
        dtype = "int32" if self.kind.takes_ids else self.compute_dtype
        inputs = (keras.KerasTensor(dims, dtype) for dims in (input_shape, *others))
        return tuple(self.compute_output_spec(*inputs).shape)

    def read(self) -> Any:
        self._ensure_built()
        return self._trees(self.compute_dtype)[0]

    def to_numpy(self) -> tuple[Any, Any]:
        self._ensure_built()
        return backend.to_numpy(self._trees(self.variable_dtype))  # type: ignore[no-any-return]

    @classmethod
    def from_numpy(
        cls,
        definition: definitions.Layer,
        parameters: Any,
        state: Any = (),
        *,
        device: str | None = None,
        dtype: str | None = None,
    ) -> Self:
        made = cls._class_of(definition, parameters, state)
        dtypes = {array.dtype.name for array in [*named_arrays(parameters).values(), *named_arrays(state).values()]}
        if dtype is None and len(dtypes) > 1:
            raise ValueError(f"expected arrays of one dtype, or a dtype; got {', '.join(sorted(dtypes))}")
        with contextlib.nullcontext() if device is None else keras.device(known_device(device, backend.devices())):
            return made(**_settings(definition), dtype=dtype or next(iter(dtypes), None))._filled(parameters, state)

    def with_settings(self, **changes: Any) -> Self:
        definition = self.definition.with_settings(**changes)
        layer: Self = type(self).from_config({**self.get_config(), **_settings(definition)})
        return layer._filled(*self.to_numpy())

    def _filled(self, parameters: Any, state: Any) -> Self:
        """Build the layer with these values from NumPy."""
        arrays = _NUMPY.from_numpy((parameters, state), dtype=self.variable_dtype)
        self._first = lambda: arrays
        self.build()
        self._first = self._drawn
        return self

    def _drawn(self) -> tuple[Any, Any]:
        """The first values under the seed, on NumPy: no compiler that traces a call of the layer sees them drawn."""
        dtype = self.variable_dtype
        options = {"xp": _NUMPY.namespace, "dtype": "float32" if dtype == "bfloat16" else dtype}
        drawn = self.definition.init(self._start, **options), self.definition.init_state(self._start, **options)
        return _NUMPY.from_numpy(drawn, dtype=dtype)  # type: ignore[no-any-return]  # NumPy draws no bfloat16

    def _ensure_built(self) -> None:
        if not self.built:
            self.build()

    def _trees(self, dtype: str) -> tuple[Any, Any]:
        """The parameters and the state, as tensors."""
        leaves = {name: keras.ops.cast(variable.value, dtype) for name, variable in self._own.items()}
        parameters, state = self.definition.parameters, self.definition.state
        return tree_from_names(parameters, leaves), tree_from_names(state, leaves, _STATE)

    def _call(self, *inputs: Any, training: bool | None = None, seed: Any = None, **options: Any) -> Any:
        """Call the definition, and in training advance the state.

        Parameters
        ----------
        attention_mask : attention_core.masks.Mask or bool tensor, optional
            True = may attend; broadcastable as the mask of the definition. One of shape (B, M, N) is one for each
            sample, as in Keras; one for each head is (1, H, M, N). A call of the layer also takes it as ``mask``, its
            name in all the libraries.
        query_mask : bool tensor, shape (..., M), optional
            By default the mask that Keras attached to the query, of which it makes fully masked rows.
        key_mask : bool tensor, shape (..., N), optional
            By default the masks that Keras attached to key and value, or without a cache to the one input.
        memory_key_mask : bool tensor, shape (..., M), optional
            By default the mask that Keras attached to the memory.
        seed : int or integer tensor, optional
            Of the dropout, instead of one drawn from the layer's generator.
        return_weights : bool
            With a flag, the result is a named tuple of the output and of what was asked for.
        training : bool, optional
            Whether anything is dropped, and the state advances.
        """
        if training is not None:
            check_flags(training=training)
        if training and self._seeds is not None:
            options["seed"] = self._seeds.next() if seed is None else plain_seed(backend.draw_seed(seed), _is_array)
        inputs, options = keras.tree.map_structure(plain, inputs), {each: plain(options[each]) for each in options}
        parameters, state = self._trees(self.compute_dtype)
        if state:
            # On PyTorch, to go backward, its values are needed even after the next step.
            options["state"] = keras.tree.map_structure(keras.ops.copy, state) if training else state
        result = self.definition(parameters, *inputs, **options, xp=backend.namespace)
        if state and training:
            advanced = self.definition.updated_state(*self._trees(self.variable_dtype), xp=backend.namespace)
            for name, value in named_arrays(advanced, _STATE).items():
                self._own[name].assign(value)
        return named_results(result)


def _unknown(options: Mapping[str, Any]) -> str:
    """The first of some options that layers of Keras do not take."""
    return next(name for name in options if name not in ("name", "dtype", "trainable", "autocast"))


def _is_array(seed: Any) -> bool:
    return hasattr(seed, "dtype") and not isinstance(seed, np.generic)


class AttentionLayer(Layer):
    """A layer with a mask over pairs, and Keras's masks over the places of its inputs."""

    def __call__(self, *inputs: Any, mask: Mask | Array | None = None, **options: Any) -> Any:
        """Call the layer, in every way in which a layer of Keras is called."""
        if mask is not None:
            if options.get("attention_mask") is not None:
                raise TypeError("expected mask, or attention_mask, which is the same; got both")
            options["attention_mask"] = mask  # by its own name, Keras would take it for the mask of the places
        return super().__call__(*inputs, **options)

    def _call(self, *inputs: Any, **options: Any) -> Any:
        """Place the masks of Keras, and call the definition."""
        mask = options.pop("attention_mask")
        if "query_mask" in options:
            masks = place_masks(inputs, options["query_mask"], options["key_mask"])
            options["query_mask"], options["key_mask"] = masks
        elif options["key_mask"] is None and options.get("cache") is None:  # Keras has none over the places of a cache
            options["key_mask"] = attached(inputs[0])
        axes = functools.partial(per_sample, query=inputs[0], has_channels=not self.kind.takes_ids)
        if options.get("memory") is not None:
            places = attached(options["memory"])
            if options["memory_mask"] is places:  # by its name, Keras takes it for the mask of the places
                options["memory_mask"] = None
            options["memory_mask"] = axes(options["memory_mask"])
            if options["memory_key_mask"] is None:
                options["memory_key_mask"] = places
        return super()._call(*inputs, mask=axes(mask), **options)


def _settings(definition: definitions.Layer) -> dict[str, Any]:
    return {name: value for name, value in definition.settings().items() if name != "layer"}


@functools.cache
def _result(names: tuple[str, ...]) -> Any:
    return Attention if names == Attention._fields else namedtuple("Attention", names)


def named_results(result: Any) -> Any:
    """A result without what was not asked for: an output of a layer of Keras is a tensor, never ``None``."""
    if not isinstance(result, Attention):
        return result
    found = {name: value for name, value in result._asdict().items() if value is not None}
    return _result(tuple(found))(**found)


def per_sample(mask: Any, query: Any, *, has_channels: bool) -> Any:
    """A mask of as many axes as the query, which in Keras is one for each sample, with the axis of heads."""
    is_array = hasattr(mask, "shape") and not isinstance(mask, Mask)
    axes = len(getattr(query, "shape", ())) + (not has_channels)
    return mask[..., None, :, :] if is_array and len(mask.shape) == axes > 2 else mask


def place_masks(inputs: tuple[Any, ...], query_mask: Any, key_mask: Any) -> tuple[Any, Any]:
    """The masks over queries and over keys: those given, or else those that Keras attached to the inputs."""
    query, key, value = inputs
    if query_mask is None:
        query_mask = attached(query)
    if key_mask is None:
        key_mask = attached(query if key is None else key)
    masks = [mask for mask in (key_mask, attached(value)) if mask is not None]
    return query_mask, functools.reduce(operator.and_, masks) if masks else None


Layer.__module__ = "attention_keras.layers"  # by which documentation knows it
